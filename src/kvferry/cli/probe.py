"""``kvferry ship probe``: which quantiser a model bears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, prompt_text, working


@command("ship probe")
@click.argument("model")
@click.option("--text", metavar="FILE", help="What prompts are cut from. [default: Python's own reference topics]")
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True, help="Prompts at most.")
@click.option("--prefix", type=click.IntRange(1), default=512, show_default=True, help="Tokens shipped a prompt.")
@click.option("--suffix", type=click.IntRange(1), default=256, show_default=True, help="Positions judged a prompt.")
@click.option("--tolerable", type=float, default=0.01, show_default=True, help="Rate of bad positions to accept.")
@click.option("--intolerable", type=float, default=0.05, show_default=True, help="Rate of bad positions to reject.")
@click.option("--alpha", type=float, default=0.05, show_default=True, help="Chance to reject a tolerable rate.")
@click.option("--beta", type=float, default=0.05, show_default=True, help="Chance to accept an intolerable rate.")
@click.option("--fresh", is_flag=True, help="Do not take up, nor keep, an answer in the cache folder.")
@model_options
def probe(
    common: Common,
    model: str,
    text: str | None,
    prompts: int,
    prefix: int,
    suffix: int,
    tolerable: float,
    intolerable: float,
    alpha: float,
    beta: float,
    fresh: bool,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Find the cheapest quantiser that MODEL bears.

    The paper's three needles are tried, then a ladder of quantisers is judged against the 16-bit cache, position by
    position, by a sequential test with stated error rates. The answer is kept, bound to the model's weights.
    """
    from kvferry.evaluate.probe import ProbeSettings
    from kvferry.evaluate.probe import probe as run_probe
    from kvferry.evaluate.sprt import Sprt
    from kvferry.hf.models import load_model

    settings = ProbeSettings(
        prefix=prefix,
        suffix=suffix,
        prompts=prompts,
        least_prompts=min(2, prompts),
        sprt=Sprt(tolerable, intolerable, alpha, beta),
        seed=common.seed,
    )
    words = prompt_text(None, text, needed=False)
    common.set_threads()
    dtype, attn = common.fill_defaults()
    with working("probing"):
        loaded, tokenizer = load_model(model, dtype=dtype, attn=attn)
        result = run_probe(loaded, tokenizer, settings, text=words, cache=not fresh)

    def show() -> None:
        trials = result.trials
        tables.show_pairs(
            {
                "INT4 allowed": "yes" if result.int4_allowed else "no",
                "quantizer": result.quantizer,
                "mean KL (nats)": tables.small(result.kl),
                "the paper's probe": f"{trials.hits} of {trials.trials} needles ({trials.full_hits} at 16 bit)",
            }
        )
        head = ("quantizer", "budget", "KL", "flips", "bad", "tested", "verdict")
        tables.show_rows(
            head,
            [
                (
                    rung.quantizer,
                    f"{rung.budget:.4f}",
                    tables.small(rung.kl_mean),
                    tables.small(rung.flip_rate),
                    tables.small(rung.bad_rate),
                    f"{rung.bad} of {rung.looks}",
                    "passed" if rung.passed else f"failed ({rung.decision})",
                )
                for rung in result.rungs
            ],
        )

    return result.to_json(), show
