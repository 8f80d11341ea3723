"""``kvferry generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, greedy_options, prompt_text, working
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.snapshot import Snapshot


@command("generate")
@click.argument("model")
@click.option("--from-cache", required=True, metavar="FILE", help="A snapshot, or a packet.")
@click.option("--prompt", metavar="TEXT", help="A prompt that begins with what the cache holds. [default: just that]")
@click.option("--text", metavar="FILE", help="The same, from a file.")
@click.option("--max-tokens", type=click.IntRange(1), help="Take at most so many tokens of the prompt.")
@click.option("--max-new", type=click.IntRange(1), default=64, show_default=True, help="Tokens to decode, at most.")
@greedy_options
def generate(
    common: Common,
    model: str,
    from_cache: str,
    prompt: str | None,
    text: str | None,
    max_tokens: int | None,
    max_new: int,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Go on greedily from a cache that MODEL, and no other, has made.

    Dtype and attention backend are the cache's own unless they are given.
    """
    words = prompt_text(prompt, text, needed=False)
    if max_tokens is not None and words is None:
        raise InvalidInput("--max-tokens cuts a prompt: give --prompt TEXT or --text FILE with it")
    common.set_threads()
    with working(f"loading {model}"):
        snapshot = load_cache(from_cache)
        from kvferry.engines.resume import resume
        from kvferry.hf.models import load_model
        from kvferry.hf.text import tokens_of

        dtype, attn = common.fill_defaults(snapshot.identity.dtype, snapshot.identity.attention)
        loaded, tokenizer = load_model(model, dtype=dtype, attn=attn)
    ids = None if words is None else tokens_of(tokenizer, words, max_tokens)
    with working("generating"):
        resumed = resume(loaded, snapshot, ids, max_new_tokens=max_new)
    rows = resumed.continuation.token_ids.tolist()
    texts = [tokenizer.decode(row) for row in rows]
    alone = len(rows) == 1
    result = {
        "token_ids": rows[0] if alone else rows,
        "text": texts[0] if alone else texts,
        "reused_tokens": resumed.reused_tokens,
        "prompt_tokens": resumed.prompt_tokens,
        "first_token_seconds": resumed.continuation.first_token_seconds,
        "seconds": resumed.continuation.seconds,
    }

    def show() -> None:
        tables.show_pairs(
            {
                "reused tokens": f"{resumed.reused_tokens:,} of {resumed.prompt_tokens:,}",
                "first token": tables.seconds(resumed.continuation.first_token_seconds),
                "new tokens": len(rows[0]),
            }
        )
        for words in texts:
            tables.show_text("text", words)

    return result, show


def load_cache(path: str) -> Snapshot:
    """The snapshot in a file of either kind. Raises `InvalidInput` for any other kind, and what loading raises."""
    from kvferry.snapshot import Snapshot
    from kvferry.snapshot.container import peek

    kind = peek(path).kind
    if kind == "snapshot":
        return Snapshot.load(path)
    if kind == "packet":
        from kvferry.ship.encode import decode
        from kvferry.ship.packet import Packet

        return decode(Packet.load(path))
    raise InvalidInput(f"{path} is a {kind}, no cache: a snapshot or a packet is")
