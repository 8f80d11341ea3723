"""``kvferry capture``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import (
    Common,
    check_output,
    command,
    greedy_options,
    prompt_text,
    working,
)


@command("capture")
@click.argument("model")
@click.option("--prompt", metavar="TEXT", help="What to prefill.")
@click.option("--text", metavar="FILE", help="A UTF-8 text file to prefill.")
@click.option("--max-tokens", type=click.IntRange(1), help="Take at most so many tokens of it.")
@click.option(
    "--queries",
    type=click.IntRange(0, 4096),
    help="Keep the last so many queries, for observation-window scores. [default: 32, what these look at]",
)
@click.option("--full-hash", is_flag=True, help="Record a hash of every byte of the weights, to be compared later.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the snapshot.")
@greedy_options
def capture(
    common: Common,
    model: str,
    prompt: str | None,
    text: str | None,
    max_tokens: int | None,
    queries: int | None,
    full_hash: bool,
    output: str,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Prefill a prompt with MODEL and write its cache to a file.

    MODEL is a folder, a hub id, or a built-in name: smollm2-135m, gemma3-270m. The file holds every token of the
    prompt; only where a sliding window has moved is the last one left out and noted, since `kvferry generate` could
    not go on otherwise.
    """
    check_output(output)
    words = prompt_text(prompt, text)
    assert words is not None
    common.set_threads()
    with working(f"loading {model}"):
        from kvferry.engines.resume import awaited_tokens, capture_prompt
        from kvferry.hf.models import load_model
        from kvferry.hf.observe import OBSERVABLE, QUERY_WINDOW
        from kvferry.hf.text import tokens_of

        dtype, attn = common.fill_defaults()
        loaded, tokenizer = load_model(model, dtype=dtype, attn=attn)
    window = QUERY_WINDOW if queries is None else queries
    ids = tokens_of(tokenizer, words, max_tokens)
    with working(f"prefilling {ids.shape[1]} tokens"):
        began = time.perf_counter()
        window = window if attn in OBSERVABLE else 0
        snapshot = capture_prompt(loaded, ids, query_window=window, full_hash=full_hash)
        seconds = time.perf_counter() - began
        size = snapshot.save(output)
    result = {
        "path": output,
        "tokens": snapshot.seq_len,
        "prompt_tokens": int(ids.shape[1]),
        "held_back": 0 if awaited_tokens(snapshot) is None else 1,
        "bytes": size,
        "cache_bytes": snapshot.nbytes,
        "seconds": seconds,
    }

    def show() -> None:
        tables.show_pairs(
            {
                "path": output,
                "tokens": f"{snapshot.seq_len:,}"
                + (" (the prompt's last one is noted beside them)" if result["held_back"] else ""),
                "bytes": tables.number_of_bytes(size),
                "prefill": tables.seconds(seconds),
            }
        )

    return result, show
