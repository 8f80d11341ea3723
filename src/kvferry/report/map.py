"""The figure of a mapper: which source layer serves which target layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.map.mapper import Mapper


def draw_heat_maps(mapper: Mapper, path: str | Path) -> None:
    """Two heat maps, keys and values: held-out R² of each target layer (rows) from each source layer alone (columns);
    dots mark the layers that the mapper uses.

    Raises:
        InvalidInput: matplotlib is missing, the mapper has no such measures, or the format is unknown.
    """
    single = mapper.measures.get("r2_single", {})
    if not all(single.get(side) for side in ("keys", "values")):
        raise InvalidInput("this mapper does not record how well each source layer serves: there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("drawing needs matplotlib: pip install 'kvferry[report]'") from error
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"{path}: figures are drawn as .png, .svg or .pdf")
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, 2)
    image: Any = None
    for axis, side in zip(axes, ("keys", "values"), strict=True):
        columns, rows = _same_side(mapper, side)
        image = axis.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        used = {
            (part.target.layer, block.layer)
            for part in mapper.parts
            if part.target.side == side
            for block in part.sources
            if block.side == side
        }
        places = {layer: place for place, layer in enumerate(columns)}
        axis.scatter(
            [places[source] for _, source in sorted(used)], [target for target, _ in sorted(used)], s=6, c="white"
        )
        axis.set_title(side)
        axis.set_xlabel(f"layer of {mapper.source.model}")
        axis.set_ylabel(f"layer of {mapper.target.model}")
    figure.colorbar(image, ax=axes, label="held-out R² of one layer alone")
    figure.savefig(path, dpi=120)


def _same_side(mapper: Mapper, side: str) -> tuple[list[int], list[list[float]]]:
    """Source layers, and R² of each target layer from the same side of each."""
    single = mapper.measures["r2_single"]
    rows: list[list[float | None]] = single[side]
    sources: list[list[Any]] = single["sources"]
    if len(rows[0]) == len(sources) and mapper.recipe.sources == "both":
        kept = [place for place, (_, own) in enumerate(sources) if own == side]
    else:
        kept = list(range(len(rows[0])))
    layers = [int(sources[place][0]) for place in kept]
    return layers, [[math.nan if (value := row[place]) is None else value for place in kept] for row in rows]
