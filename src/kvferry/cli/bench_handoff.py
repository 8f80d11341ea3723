"""``kvferry bench handoff``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, check_output, command, model_options, plain
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.engines.handoff.bench import HandoffBenchResult, OnProgress

MODES = {"plain": (False,), "pipelined": (True,), "both": (False, True)}


@command("bench handoff")
@click.argument("model")
@click.option("--tokens", default="512,1024,2048,4096", show_default=True, metavar="N,…", help="Prompt lengths.")
@click.option(
    "--links",
    default="100mbit,500mbit,1gbit,10gbit",
    show_default=True,
    metavar="RATE,…",
    help="Shaped links, which need Linux, root and iproute2; or `loopback`.",
)
@click.option(
    "--budgets",
    default="1,0.52,0.28,0.28+",
    show_default=True,
    metavar="B[:POLICY][+],…",
    help="Bytes over those of the 16-bit packet, at most; the policy where it is not auto; + for progressive.",
)
@click.option(
    "--mode",
    type=click.Choice(list(MODES)),
    default="both",
    show_default=True,
    help="Layers sent while later ones are prefilled, or all after the prefill.",
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of every combination.")
@click.option("--text", metavar="FILE", help="What to prefill. [default: Python's own reference topics]")
@click.option("--log", metavar="FILE", help="Keep each hand-off there as it comes; a stopped run goes on from it.")
@click.option("--markdown", metavar="FILE", help="Write the tables there, too.")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Longest silence of the other process, in s."
)
@model_options
def bench_handoff(
    common: Common,
    model: str,
    tokens: str,
    links: str,
    budgets: str,
    mode: str,
    repeats: int,
    text: str | None,
    log: str | None,
    markdown: str | None,
    timeout: float,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Time to the first token of hand-offs of MODEL over links of stated rates.

    Two processes do them all, in random order, with their models loaded; each combination is warmed up first.
    """
    from kvferry.cli.environment import environment
    from kvferry.engines.handoff.bench import Arm, HandoffBenchSettings, run_bench
    from kvferry.report.bench_handoff import render_bench
    from kvferry.snapshot.files import write_text

    if markdown is not None:
        check_output(markdown, *([text] if text else []))
    dtype, attn = common.fill_defaults()
    settings = HandoffBenchSettings(
        model=model,
        tokens=tuple(_each(tokens, "--tokens", int, "512,1024")),
        links=tuple(_each(links, "--links", str, "100mbit,1gbit")),
        arms=tuple(_each(budgets, "--budgets", Arm.parse, "1,0.52:uniform_int8,0.28+")),
        modes=MODES[mode],
        repeats=repeats,
        text_file=text,
        dtype=dtype,
        attn=attn,
        threads=common.threads,
        seed=common.seed,
        timeout=timeout,
    )
    with _progress() as on_progress:
        result = run_bench(settings, on_progress, None if log is None else Path(log))
    if markdown is not None:
        write_text(Path(markdown), render_bench(plain(result.to_json()), environment(common)))

    def show() -> None:
        _show(result)

    return result.to_json(), show


def _each(text: str, option: str, read: Callable[[str], Any], example: str) -> list[Any]:
    try:
        return [read(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"{option} is {text!r}: give a list such as {example}") from error


@contextmanager
def _progress() -> Iterator[OnProgress | None]:
    """A bar on standard error; ``None`` where that is no terminal."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("")

        def told(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield told


def _show(result: HandoffBenchResult) -> None:
    from kvferry.engines.handoff.bench import Arm

    head = ("tokens", "link", "budget", "actual", "mode", "n", "prefill", "wire", "TTFT", "quartiles", "bound", "met")
    rows = []
    for row in result.rows:
        ttft = row.seconds["ttft"]
        rows.append(
            (
                f"{row.tokens:,}",
                row.link,
                str(Arm(row.budget_asked, row.policy, row.progressive)),
                f"{row.budget:.4f}",
                "pipelined" if row.pipelined else "plain",
                str(row.n),
                tables.seconds(row.seconds["prefill"].median),
                tables.seconds(row.seconds["wire"].median),
                tables.seconds(ttft.median),
                f"{tables.seconds(ttft.quartiles[0])} to {tables.seconds(ttft.quartiles[1])}",
                "" if row.bound is None else tables.seconds(row.bound.seconds),
                "" if row.bound is None else ("yes" if row.bound.met else "no"),
            )
        )
    tables.show_rows(head, rows, f"{result.settings.model}: medians")
    for skipped in result.skipped:
        tables.show_text(f"not measured: {skipped['combination']}", skipped["reason"])
