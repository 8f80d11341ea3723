"""``kvferry plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command, model_options, numbers, working
from kvferry.report.tables import brief_quantizers

PLANNED_HELP = "What chooses each token's bits: all but klt, which has to see the cache; a wrong name shows them."


@command("plan")
@click.argument("model")
@click.option(
    "--tokens", type=click.IntRange(1, 2**22), default=1536, show_default=True, help="Of the prompt, shipped."
)
@click.option("--budgets", default="1,0.52,0.28,0.2", show_default=True, metavar="B,B", help="Of actual bytes.")
@click.option("--policy", default="auto", show_default=True, help=PLANNED_HELP)
@click.option("--link", metavar="RATE", help="Rate of the link, as in 100mbit or 1gbit.")
@click.option("--prefill-seconds", type=click.FloatRange(0, min_open=True), help="Of the prompt, where it is known.")
@click.option("--measure", is_flag=True, help="Run the prefill here instead, three times, and take the median.")
@model_options
def plan(
    common: Common,
    model: str,
    tokens: int,
    budgets: str,
    policy: str,
    link: str | None,
    prefill_seconds: float | None,
    measure: bool,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Say what a hand-off of MODEL's cache will weigh, to the byte, before anything is prefilled.

    With --link and a prefill time also how long it takes at least: these times are simulated.
    """
    from kvferry.engines.link import parse_rate
    from kvferry.errors import InvalidInput

    wanted = numbers(budgets, "--budgets")
    if measure and prefill_seconds is not None:
        raise InvalidInput("give --prefill-seconds or --measure, not both")
    bits = None if link is None else parse_rate(link)
    common.set_threads()
    dtype, attn = common.fill_defaults()
    with working("loading the model"):
        from kvferry.engines.sizes import measure_prefill, packet_sizes
        from kvferry.hf.models import load_model

        loaded, _ = load_model(model, dtype=dtype, attn=attn)
    if measure:
        prefill_seconds = measure_prefill(loaded, tokens)
    sizes = packet_sizes(loaded, tokens, wanted, policy=policy, bits_per_second=bits, prefill_seconds=prefill_seconds)
    result = {
        "model": model,
        "tokens": tokens,
        "link": link,
        "prefill_seconds": prefill_seconds,
        "measured": measure,
        "rows": [size.to_json() for size in sizes],
        "checks_failed": all(size.reason is not None for size in sizes),
    }

    def show() -> None:
        rows = []
        for size in sizes:
            if size.nbytes is None or size.budget is None or size.full_bytes is None:
                rows.append((f"{size.budget_asked:g}", "cannot be met", "", "", "", ""))
                continue
            rows.append(
                (
                    f"{size.budget_asked:g}",
                    f"{size.budget:.4f}",
                    f"{size.nbytes:,}",
                    f"{size.policy}, {brief_quantizers(size.quantizer)}",
                    "" if size.wire_seconds is None else tables.seconds(size.wire_seconds),
                    "" if size.ttft_seconds is None else tables.seconds(size.ttft_seconds),
                )
            )
        head = ("budget", "actual", "bytes", "policy, quantizers", "wire, simulated", "first token at the earliest")
        known = 4 + (link is not None) + (link is not None and prefill_seconds is not None)
        tables.show_rows(head[:known], [row[:known] for row in rows])

    return result, show
