"""``kvferry bench map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, prompt_text
from kvferry.cli.map_eval import loaded
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput


@command("bench map")
@click.argument("folder", metavar="DIR")
@click.option("--text", metavar="FILE", help="The context. [default: Python's own reference topics]")
@click.option("--source", "source_name", metavar="MODEL", help="[default: as the mapper names it]")
@click.option("--target", "target_name", metavar="MODEL", help="[default: as the mapper names it]")
@click.option("--lengths", default="256,512,1024,2048", show_default=True, metavar="N,N", help="Tokens of context.")
@click.option(
    "--recompute-last",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Last tokens that the target computes anew.",
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of each, in random order.")
@model_options
def bench_map(
    common: Common,
    folder: str,
    text: str | None,
    source_name: str | None,
    target_name: str | None,
    lengths: str,
    recompute_last: int,
    repeats: int,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Time a mapped cache beside the target's own prefill, over lengths of context.

    Warm medians in one run; loading the mapper is shown as cold, the source's prefill apart.
    """
    words = prompt_text(None, text, needed=False)
    wanted = [item.strip() for item in lengths.split(",") if item.strip()]
    if not wanted or not all(item.isascii() and item.isdecimal() and 0 < int(item) < 10**7 for item in wanted):
        raise InvalidInput(f"--lengths {lengths}: numbers of tokens, such as 256,1024")
    common.set_threads()
    mapper, source, target, tokenizer, words = loaded(common, folder, source_name, target_name, words)
    from kvferry.evaluate import bench_map as bench
    from kvferry.hf.text import tokens_of

    counts = [int(item) for item in wanted]
    ids = tokens_of(tokenizer, words, max(counts))
    with progress() as told:
        rows = bench.bench_map(
            mapper,
            source,
            target,
            ids,
            counts,
            recompute_last=recompute_last,
            repeats=repeats,
            folder=folder,
            seed=common.seed,
            on_step=told,
        )
    result = {
        "path": folder,
        "source": mapper.source.model,
        "target": mapper.target.model,
        "top_k": mapper.recipe.top_k,
        "repeats": repeats,
        "rows": [row.to_json() for row in rows],
    }

    def show() -> None:
        tables.show_rows(
            ("tokens", "map", "transfer", "install", "own prefill", "faster", "cold", "source's prefill"),
            [
                (
                    f"{row.tokens:,}",
                    tables.seconds(row.map),
                    tables.seconds(row.transfer),
                    tables.seconds(row.install),
                    tables.seconds(row.prefill),
                    f"{row.speedup:.1f} times",
                    "" if row.cold is None else tables.seconds(row.cold),
                    tables.seconds(row.source_prefill),
                )
                for row in rows
            ],
        )

    return result, show
