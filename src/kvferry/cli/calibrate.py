"""``kvferry ship calibrate``: the transform that policy klt needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, check_output, command, model_options, prompt_text, working
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput


@command("ship calibrate")
@click.argument("model")
@click.option("--text", metavar="FILE", help="What caches are made of. [default: Python's own reference topics]")
@click.option("-o", "--output", metavar="FILE", help="Write the transform there too, to be taken to a receiver.")
@click.option("--keep/--no-keep", default=True, show_default=True, help="Keep it in the cache folder.")
@click.option("--windows", type=click.IntRange(4), default=44, show_default=True, help="Of the text, at most.")
@click.option(
    "--gradient-windows", type=click.IntRange(4), default=28, show_default=True, help="Those that gradients are of."
)
@click.option("--prefix", type=click.IntRange(16), default=1024, show_default=True, help="Tokens cached a window.")
@click.option("--suffix", type=click.IntRange(1), default=384, show_default=True, help="Tokens that look back at them.")
@model_options
def calibrate(
    common: Common,
    model: str,
    text: str | None,
    output: str | None,
    keep: bool,
    windows: int,
    gradient_windows: int,
    prefix: int,
    suffix: int,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Make the transform of MODEL that policy klt encodes and decodes with.

    It is bound to the model's weights and dtype. Both ends need it: the receiver looks for it in its own cache folder,
    by the digest that a packet names, or takes its file. What is kept also serves policy optimal at the sender, which
    then knows how much each layer feels an error.
    """
    if output is None and not keep:
        raise InvalidInput("--no-keep leaves nothing of the work: give --output FILE with it")
    if output is not None:
        check_output(output)
    words = prompt_text(None, text, needed=False)
    common.set_threads()
    dtype, attn = common.fill_defaults()
    with working(f"loading {model}"):
        from kvferry.evaluate.calibrate import calibrate as make
        from kvferry.evaluate.sensitivity import calibrate_sensitivity
        from kvferry.hf.models import load_model
        from kvferry.hf.text import default_text
        from kvferry.ship.transform import store

        loaded, tokenizer = load_model(model, dtype=dtype, attn=attn)
    began = time.perf_counter()
    with progress() as told:

        def on_window(done: int, total: int) -> None:
            if told is not None:
                told(done, total, "windows" if done < total else "bases and tables")

        transform = make(
            loaded,
            tokenizer,
            default_text() if words is None else words,
            windows=windows,
            gradient_windows=gradient_windows,
            prefix=prefix,
            suffix=suffix,
            seed=common.seed,
            on_window=on_window,
        )
    if keep:
        with working("sensitivities for policy optimal"):
            calibrate_sensitivity(loaded, tokenizer, prefix=prefix, suffix=suffix, seed=common.seed)
    seconds = time.perf_counter() - began
    kept = str(store.keep(transform)) if keep else None
    if output is not None:
        transform.save(output)
    from pathlib import Path

    path = output or kept
    assert path is not None
    result = {
        "path": path,
        "kept": kept,
        "digest": transform.digest,
        "bytes": Path(path).stat().st_size,
        "seconds": seconds,
        "windows": transform.made["windows"],
        "tokens": transform.made["tokens"],
        "made": dict(transform.made),
    }

    def show() -> None:
        tables.show_pairs(
            {
                "path": path,
                **({} if kept is None or kept == path else {"kept": kept}),
                "digest": transform.digest,
                "bytes": tables.number_of_bytes(result["bytes"]),
                "made of": f"{result['windows']} windows, {result['tokens']:,} tokens",
                "calibration": tables.seconds(seconds),
            }
        )

    return result, show
