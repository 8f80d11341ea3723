"""``kvferry ship sweep``: policies × quantisers × budgets × metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import (
    Common,
    check_int4,
    check_output,
    command,
    int4_option,
    model_options,
    names,
    numbers,
    prompt_text,
    working,
)
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.evaluate.method import Method
    from kvferry.evaluate.sweep import SweepRow

POLICIES = "auto,greedy,balanced,sink_protect"
BUDGETS = "0.52,0.4,0.28"


@command("ship sweep")
@click.argument("model")
@click.option("--text", metavar="FILE", help="What windows are cut from. [default: Python's own reference topics]")
@click.option("--windows", type=click.IntRange(0), default=16, show_default=True, help="Of the text; 0: no perplexity.")
@click.option("--prefix", type=click.IntRange(1), default=1024, show_default=True, help="Tokens shipped a window.")
@click.option("--suffix", type=click.IntRange(1), default=1024, show_default=True, help="Tokens scored a window.")
@click.option("--policies", default=POLICIES, show_default=True, help="Names, with commas between them.")
@click.option("--budgets", default=BUDGETS, show_default=True, help="Actual bytes over those of the 16-bit packet.")
@click.option("--nominal-budgets", help="The policies' own mean cost of a token, besides or instead.")
@click.option("--quantizers", help="Such as sym,asym,chan or sym8/chan4b128:asym4g64. [default: the policy's]")
@click.option("--scorer", help="What ranks tokens. [default: the last queries' attention]")
@click.option("--decay", type=float, help="λ of the scorer. [default: its own]")
@int4_option
@click.option("--no-baselines", is_flag=True, help="Leave full, zero_cache, no_prefix, uniform_* and random_tier out.")
@click.option("--needle", is_flag=True, help="Also look for needles in a haystack.")
@click.option("--needle-lengths", default="512,1024,2048", show_default=True, help="Tokens of the prompts.")
@click.option("--needle-depths", type=click.IntRange(1), default=9, show_default=True, help="Depths, evenly spread.")
@click.option("--needle-count", type=click.IntRange(1), default=3, show_default=True, help="Needles a depth.")
@click.option("--question-after", is_flag=True, help="Ask after shipping: the question is no part of the cache.")
@click.option("--haystack", metavar="FILE", help="Text to hide needles in. [default: generated sentences]")
@click.option("--attention/--no-attention", default=True, show_default=True, help="Cosines of attention outputs too.")
@click.option("--step", type=click.IntRange(1), help="Tokens a forward pass over the suffix. [default: all]")
@click.option("--log", "log_path", metavar="FILE", help="Results as they come. [default: in the cache folder]")
@click.option("--fresh", is_flag=True, help="Do not go on from an earlier run of the same, nor keep results for one.")
@click.option("--csv", "csv_path", metavar="FILE", help="Write the rows there too.")
@click.option("--plots", metavar="DIR", help="Write figures there; needs matplotlib (pip install 'kvferry[report]').")
@model_options
def sweep(
    common: Common,
    model: str,
    text: str | None,
    windows: int,
    prefix: int,
    suffix: int,
    policies: str,
    budgets: str,
    nominal_budgets: str | None,
    quantizers: str | None,
    scorer: str | None,
    decay: float | None,
    int4_allowed: bool | None,
    no_baselines: bool,
    needle: bool,
    needle_lengths: str,
    needle_depths: int,
    needle_count: int,
    question_after: bool,
    haystack: str | None,
    attention: bool,
    step: int | None,
    log_path: str | None,
    fresh: bool,
    csv_path: str | None,
    plots: str | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Compare ways to ship MODEL's caches: quality against actual bytes.

    The cache of a prefix is shipped and restored, then the tokens after it are scored through the cached decode path;
    every method scores the same tokens.
    """
    from kvferry.evaluate.log import default_log
    from kvferry.evaluate.method import expand
    from kvferry.evaluate.needle import NeedleGrid
    from kvferry.evaluate.sweep import BASELINES, SweepSettings
    from kvferry.evaluate.sweep import sweep as run_sweep
    from kvferry.evidence.log import ResultLog
    from kvferry.hf.models import load_model
    from kvferry.hf.text import default_text
    from kvferry.report import sweep as report

    check_int4(int4_allowed, names(policies))
    if fresh and log_path is not None:
        raise InvalidInput("give --log or --fresh, not both")
    if decay is not None and not 0 <= decay < math.inf:
        raise InvalidInput(f"--decay is {decay}: give a number of at least 0")
    report.require_writable(csv_path, plots)
    if csv_path is not None and Path(csv_path).parent.is_dir():  # else it is made when there is something to write
        check_output(csv_path, *(file for file in (text, haystack) if file is not None))
    given, nominal = numbers(budgets, "--budgets"), numbers(nominal_budgets, "--nominal-budgets")
    options = {"scorer": scorer, "decay": decay, "seed": common.seed, "nominal_budgets": nominal}
    methods: list[Method] = [] if no_baselines else list(BASELINES)
    # A quantiser may itself hold commas nowhere, so a comma always parts two of them.
    specs: list[str | None] = [*names(quantizers)] or [None]
    methods += expand(names(policies), given, quantizers=specs, **options)  # type: ignore[arg-type]
    if not no_baselines:
        methods += expand(["random_tier"], given, **options)  # type: ignore[arg-type]
    grid = NeedleGrid(
        lengths=tuple(int(length) for length in numbers(needle_lengths, "--needle-lengths")),
        depths=tuple(place / max(1, needle_depths - 1) for place in range(needle_depths)),
        needles=needle_count,
        question_cached=not question_after,
        seed=common.seed,
    )
    chosen = SweepSettings(
        methods=tuple(dict.fromkeys(methods)),
        windows=windows,
        prefix=prefix,
        suffix=suffix,
        needle=grid if needle else None,
        attention=attention,
        step=step,
        seed=common.seed,
    )
    words = default_text() if text is None else prompt_text(None, text)
    hay = prompt_text(None, haystack, needed=False)
    common.set_threads()
    dtype, attn = common.fill_defaults()
    with working("loading the model"):
        loaded, tokenizer = load_model(model, dtype=dtype, attn=attn)
    chosen = replace(chosen, methods=tuple(settled(chosen.methods, loaded, int4_allowed)))
    if log_path is None and not fresh:
        log_path = str(default_log(loaded, chosen, words or "", hay))
    with progress() as on_progress, ResultLog(log_path) as results:
        result = run_sweep(
            loaded, tokenizer, words or "", chosen, haystack=hay, results=results, on_progress=on_progress
        )
    files = report.write(result, tokenizer, csv_path=csv_path, plots=plots)

    def show() -> None:
        show_rows(list(result.rows))
        for path in files:
            tables.show_text("written", path)

    asked = [row for row in result.rows if row.asked not in BASELINES]
    nothing = bool(asked) and all(row.reason is not None for row in asked)
    return {**result.to_json(), "files": files, "checks_failed": nothing}, show


def settled(methods: Sequence[Method], model: Any, int4_allowed: bool | None) -> Iterator[Method]:
    """``methods``, those of adaptive, auto and klt with what is kept of ``model``; `InvalidInput` where nothing is."""
    from kvferry.evaluate.kept import int4_answer
    from kvferry.hf.identity import identity_of
    from kvferry.ship.plan import DEFAULT
    from kvferry.ship.transform.plan import POLICY
    from kvferry.ship.transform.store import for_model, kept_for

    for method in methods:
        if method.policy == POLICY:
            yield replace(method, transform=for_model(identity_of(model)).digest)
            continue
        if method.policy == DEFAULT:
            kept = kept_for(identity_of(model))
            yield method if kept is None else replace(method, transform=kept.digest)
            continue
        if method.policy == "adaptive":
            answer = int4_answer(identity_of(model), int4_allowed)
            specs = method.quantizers or answer.quantizers
            yield replace(method, int4_allowed=answer.allowed, quantizers=specs)
        else:
            yield method


def show_rows(rows: list[SweepRow]) -> None:
    """A line a method."""

    def interval(pair: tuple[float, float] | None) -> str:
        return "" if pair is None else f"[{pair[0]:+.2f}, {pair[1]:+.2f}]"

    head = ("policy", "quantizer", "asked", "budget", "ppl", "Δ%", "95%", "KL", "top-1", "needle")
    lines = []
    for row in sorted(rows, key=lambda row: -1.0 if row.budget is None else row.budget, reverse=True):
        asked = row.asked.budget if row.asked.budget is not None else row.asked.nominal_budget
        shown = "" if asked is None else f"{asked:g}" if row.asked.budget is not None else f"b={asked:g}"
        if row.reason is not None:
            lines.append((row.policy, "not possible", shown, *[""] * 7))
            continue
        lines.append(
            (
                row.policy,
                row.quantizer,
                shown,
                f"{row.budget:.4f}",
                tables.small(row.ppl),
                "" if row.ppl_delta_pct is None else f"{row.ppl_delta_pct:+.3f}",
                interval(row.ppl_delta_ci),
                tables.small(row.kl_mean),
                tables.small(row.top1_agreement),
                "" if row.needle is None else f"{row.needle.hits}/{row.needle.n}",
            )
        )
    tables.show_rows(head, lines)
    for row in rows:
        if row.reason is not None:
            tables.show_text("not possible", row.reason)
