"""``kvferry map explain``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, check_output, command
from kvferry.cli.map import chosen_layers


@command("map explain")
@click.argument("folder", metavar="DIR")
@click.option("--plot", metavar="FILE", help="Draw the heat maps, as PNG or SVG.")
def explain(common: Common, folder: str, plot: str | None) -> tuple[dict[str, Any], Callable[[], None]]:  # noqa: ARG001
    """Show which source layers each layer of the target is made of, and how well each of them serves alone.

    R² is of tokens held out at the fit. The heat map has a row a target layer and a column a source layer.
    """
    if plot is not None:
        check_output(plot)
    from kvferry.map.mapper import Mapper

    mapper = Mapper.from_pretrained(folder)
    single = mapper.measures.get("r2_single", {})
    r2 = mapper.measures.get("r2", {})
    chosen = chosen_layers(mapper)
    if plot is not None:
        from kvferry.report.map import draw_heat_maps

        draw_heat_maps(mapper, plot)
    result = {
        "digest": mapper.digest,
        "source": mapper.source.model,
        "target": mapper.target.model,
        "recipe": {
            "variant": mapper.recipe.variant,
            "top_k": mapper.recipe.top_k,
            "ridge": mapper.recipe.ridge,
            "sources": mapper.recipe.sources,
            "native_prefix": mapper.recipe.native_prefix,
        },
        "made": dict(mapper.made),
        "parameters": mapper.parameters,
        "r2": r2,
        "r2_single": single,
        "layers_chosen": chosen,
        "plot": plot,
    }

    def show() -> None:
        tables.show_pairs(
            {
                "source": f"{mapper.source.model} ({len(mapper.source.layers)} layers)",
                "target": f"{mapper.target.model} ({len(mapper.target.layers)} layers)",
                "variant": f"{mapper.recipe.variant}, {mapper.recipe.top_k or 'all'} source layers",
                "parameters": f"{mapper.parameters:,}",
                "digest": mapper.digest,
            }
        )
        rows = [
            (
                str(layer),
                _r2(r2, "keys", layer),
                _names(chosen["keys"][layer]),
                _r2(r2, "values", layer),
                _names(chosen["values"][layer]),
            )
            for layer in range(len(mapper.target.layers))
        ]
        tables.show_rows(("layer", "R² keys", "from", "R² values", "from"), rows)

    return result, show


def _r2(r2: dict[str, list[float]], side: str, layer: int) -> str:
    values = r2.get(side, [])
    return f"{values[layer]:.3f}" if layer < len(values) else ""


def _names(blocks: list[list[object]]) -> str:
    """Layers, with a letter where keys and values of the source both serve."""
    sides = {side for _, side in blocks}
    return " ".join(f"{layer}{str(side)[0] if len(sides) > 1 else ''}" for layer, side in blocks)
