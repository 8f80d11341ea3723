"""``kvferry pair make``: a smaller model with the same cache geometry, where no family has one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, prompt_text, working
from kvferry.cli.lazy import LazyGroup
from kvferry.cli.progress import OnProgress, progress
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.hf.pair import PairResult
    from kvferry.hf.train import Progress

log = logging.getLogger(__name__)

DEFAULT_MINUTES = 40.0
TINY_TOKENS = 250_000
TELL_EVERY = 30.0
"""Seconds between lines in the log, with ``--debug``."""


@click.group("pair", cls=LazyGroup, lazy={"make": ("kvferry.cli.pair:make", "Make a smaller model from one.")})
def pair() -> None:
    """Two models whose caches can be mapped onto one another."""


@command("pair make")
@click.argument("parent", required=False)
@click.option("--tiny", is_flag=True, help="Two tiny models from scratch instead of a child of PARENT; two minutes.")
@click.option("--layers", type=click.IntRange(1), help="Of the child. [default: two thirds of the parent's]")
@click.option(
    "--text", "texts", metavar="FILE", multiple=True, help="To train on; several. [default: Python's own topics]"
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Of training. [default: 40, or --tokens]")
@click.option("--tokens", type=click.IntRange(1), help="To train on; with --minutes, whichever is up first.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Highest learning rate. [default: 6e-4; --tiny: 4e-3]"
)
@click.option("--batch", type=click.IntRange(1), help="Windows a step. [default: 4; --tiny: 8]")
@click.option("--window", type=click.IntRange(8), help="Tokens a window. [default: 256]")
@click.option("-o", "--output", metavar="DIR", help="The new folder. [default: one in the cache folder]")
@model_options
def make(
    common: Common,
    parent: str | None,
    tiny: bool,
    layers: int | None,
    texts: tuple[str, ...],
    minutes: float | None,
    tokens: int | None,
    rate: float | None,
    batch: int | None,
    window: int | None,
    output: str | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Make a child of PARENT: fewer layers, the same kv heads, head size and tokenizer.

    The layers of least influence go; what is left is trained on the parent's predictions. A run that was stopped goes
    on where it was when the same command is given again; a child that is there already is not made again.
    """
    if (parent is None) != tiny:
        raise InvalidInput("give the parent model, or --tiny without one")
    if tiny and (layers is not None or texts or window is not None):
        raise InvalidInput("--tiny has its own text, window and layers: leave --text, --window and --layers out")
    read = [prompt_text(None, path, needed=False) for path in texts]
    common.set_threads()
    dtype, attn = common.fill_defaults("float32" if tiny else None)
    if tiny and (dtype, attn) != ("float32", "sdpa"):
        raise InvalidInput("--tiny is made in float32 with sdpa: leave --dtype and --attn out")
    began = time.perf_counter()
    with working("loading"):
        from kvferry.hf.models import load_model
        from kvferry.hf.pair import PairSettings, make_pair
        from kvferry.hf.text import default_text
        from kvferry.hf.tiny_pair import make_tiny_pair
        from kvferry.hf.train import TrainSettings

        given: dict[str, Any] = {"rate": rate, "batch": batch, "tokens": tokens, "minutes": minutes}
        if tokens is None and minutes is None:
            given |= {"tokens": TINY_TOKENS} if tiny else {"minutes": DEFAULT_MINUTES}
        usual: dict[str, Any] = {"rate": 4e-3, "batch": 8} if tiny else {}
        chosen = usual | {name: value for name, value in given.items() if value is not None}
        training = TrainSettings(**chosen, seed=common.seed)
    with progress() as told:
        teller = _Teller(told)
        if tiny:
            made = make_tiny_pair(training, folder=output, on_step=teller.step, on_stage=teller.stage)
        else:
            assert parent is not None
            model, tokenizer = load_model(parent, dtype=dtype, attn=attn)
            made = make_pair(
                model,
                tokenizer,
                [text for text in read if text is not None] or [default_text()],
                PairSettings(training, layers, **({} if window is None else {"window": window})),
                name=parent,
                folder=output,
                on_step=teller.step,
                on_stage=teller.stage,
            )
    result = {**made.to_json(), "seconds": time.perf_counter() - began}
    return result, lambda: _show(made, result["seconds"])


class _Teller:
    """Says how far the work is: on the bar, or now and then in the log."""

    def __init__(self, told: OnProgress | None):
        self.told = told
        self.what = ""
        self.last = 0.0

    def stage(self, what: str) -> None:
        self.what = what
        log.info("%s", what)
        if self.told is not None:
            self.told(0, 1000, what)

    def step(self, at: Progress) -> None:
        now = time.monotonic()
        pace = at.tokens / max(1e-9, at.seconds)
        words = f"{self.what}: {at.tokens:,} tokens, loss {at.loss:.3f}"
        if self.told is not None:
            self.told(int(1000 * at.done), 1000, words)
        if now - self.last >= TELL_EVERY or at.done == 1:
            self.last = now
            log.info("%s, %.0f tokens/s, %.0f%%, %.0f minutes left", words, pace, 100 * at.done, at.seconds_left / 60)


def _show(made: PairResult, seconds: float) -> None:
    rows = {"path": made.path, "already there": "yes" if made.found else "no"}
    if made.kept:
        scores = made.made["held_out_nll"]
        rows["layers kept"] = " ".join(map(str, made.kept))
        rows["trained on"] = f"{made.made['progress']['tokens']:,} tokens"
        for name, what in (("parent", "parent"), ("child_before", "child, untrained"), ("child", "child")):
            if scores[name] is not None:
                rows[f"held-out nll, {what}"] = f"{scores[name]:.3f}"
    else:
        for name in ("large", "small"):
            own = made.made[name]
            rows[name] = f"{own['progress']['tokens']:,} tokens, held-out nll {own['held_out_nll']:.3f}"
    rows["time"] = tables.seconds(seconds)
    tables.show_pairs(rows)
