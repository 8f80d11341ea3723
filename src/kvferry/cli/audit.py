"""``kvferry audit``: measure, locate and explain what a cache differs by from recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import DTYPES, Common, check_kind, command, model_options, prompt_text, working
from kvferry.cli.progress import progress
from kvferry.errors import InvalidInput

if TYPE_CHECKING:
    from kvferry.audit.finding import Finding
    from kvferry.audit.passages import Passage
    from kvferry.audit.settings import Settings

EXACT_DTYPES = (*DTYPES, "float64")
"""What audits run in: float64 is no dtype to ship in, but the one that shows what the others round."""

QUICK_PROTOCOLS = "fixed_prefix,free_run,transplant"


@command("audit")
@click.argument("model")
@click.option("--protocol", "protocols", multiple=True, metavar="P[,P]", help="What to run; see docs/audit.md.")
@click.option("--text", metavar="FILE", help="What sequences are cut from. [default: Python's own reference topics]")
@click.option("--tasks", metavar="FILE", help='Prompts instead: a line {"question": …, "answer": …} each.')
@click.option("--n", type=click.IntRange(1), help="Sequences or prompts. [default: 8; quick: 2]")
@click.option("--prefix", type=click.IntRange(2), help="Tokens of a prefix. [default: 128; quick: 48]")
@click.option("--suffix", type=click.IntRange(1), help="Tokens compared after it. [default: 32; quick: 6]")
@click.option("--new", "new_tokens", type=click.IntRange(1), help="Tokens of a free run. [default: 64; quick: 12]")
@click.option("--samplers", default=None, help="greedy, top_k, top_p, temperature, with commas. [default: greedy]")
@click.option("--dtypes", help=f"Run in each of these, with commas: {', '.join(EXACT_DTYPES)}. [default: --dtype]")
@click.option("--longest", type=click.IntRange(2), help="Leave out prompts of --tasks with more tokens.")
@click.option("--screen", type=float, help="Greedy OFF runs recompute only near ties: see docs/audit.md. [default: 0]")
@click.option("--ignore-eos", is_flag=True, help="Free runs go on behind an end of text: all have --new tokens.")
@click.option("--until-split", is_flag=True, help="Free runs end where they part: cheaper, and no answers.")
@click.option(
    "--layer-step", type=click.IntRange(1), help="Layers between two that are patched. [default: 1; quick: 6]"
)
@click.option(
    "--parted", type=click.IntRange(0), help="Transplant only the first so many whose donor and recipient part. [all]"
)
@click.option("--ranges", type=click.IntRange(0), help="Of these, so many by layers and tokens, too. [default: all]")
@click.option("--explain", type=click.IntRange(0), help="Free runs explained with controls. [default: 2; quick: 1]")
@click.option("--no-precision", is_flag=True, help="Leave the float64 runs out: no verdict semantic, no oracle.")
@click.option("--packet", metavar="FILE", help="Audit this packet against MODEL's own cache.")
@click.option("--cache", metavar="FILE", help="Audit this snapshot against MODEL's own cache.")
@click.option("--quick", is_flag=True, help="Small sizes: under two minutes on SmolLM2-135M.")
@click.option("--log", "log_path", metavar="FILE", help="Keep records there as they come, and go on from them.")
@click.option("--plots", metavar="DIR", help="Write figures there; needs matplotlib (pip install 'kvferry[report]').")
@partial(model_options, dtypes=EXACT_DTYPES)
def audit(
    common: Common,
    model: str,
    protocols: tuple[str, ...],
    text: str | None,
    tasks: str | None,
    n: int | None,
    prefix: int | None,
    suffix: int | None,
    new_tokens: int | None,
    samplers: str | None,
    dtypes: str | None,
    longest: int | None,
    screen: float | None,
    ignore_eos: bool,
    until_split: bool,
    layer_step: int | None,
    parted: int | None,
    ranges: int | None,
    explain: int | None,
    no_precision: bool,
    packet: str | None,
    cache: str | None,
    quick: bool,
    log_path: str | None,
    plots: str | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Hold MODEL's cached decoding against recomputation: measure, locate, explain.

    Status 1 where something is semantic or overflows, or where self_check's planted faults are not caught.
    """
    from kvferry.audit.settings import QUICK, Settings
    from kvferry.report import audit as report

    if plots is not None:
        report.require_writable(plots)
    if text is not None and tasks is not None:
        raise InvalidInput("give --text or --tasks, not both")
    common.set_threads()
    base = QUICK if quick else Settings()
    given = {
        "new_tokens": new_tokens,
        "layer_step": layer_step,
        "parted": parted,
        "ranges": ranges,
        "explain": explain,
        "screen": screen,
        "samplers": _names(samplers) or None,
    }
    settings = replace(
        base,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        until_split=until_split,
        ignore_ends=ignore_eos,
        seed=common.seed,
        controls=replace(base.controls, precision=not no_precision),
    )
    names = _names(",".join(protocols)) or _names(QUICK_PROTOCOLS if quick else "fixed_prefix")
    if packet is not None or cache is not None:
        if packet is not None and cache is not None:
            raise InvalidInput("give --packet or --cache, not both")
        if protocols or dtypes or tasks or longest:
            raise InvalidInput("--packet and --cache have a protocol, dtype and tokens of their own")
        findings, floor = _given(common, model, packet, cache, settings)
    else:
        sizes = (n or (2 if quick else 8), prefix or (48 if quick else 128), suffix or (6 if quick else 32))
        words = None if tasks is not None else prompt_text(None, text, needed=False)
        findings, floor = _protocols(common, model, names, settings, words, (tasks, longest), sizes, dtypes, log_path)
    rows = [finding.to_json() for finding in findings]
    files = [] if plots is None else report.write(rows, plots, title=model)
    bad = any(finding.bad for finding in findings)

    def show() -> None:
        show_findings(findings)
        for path in files:
            tables.show_text("written", path)

    return {
        "findings": rows,
        "replica_floor": floor,
        "settings": settings.to_json(),
        "files": files,
        "checks_failed": bad,
    }, show


def _protocols(
    common: Common,
    name: str,
    protocols: tuple[str, ...],
    settings: Settings,
    words: str | None,
    tasks: tuple[str | None, int | None],
    sizes: tuple[int, int, int],
    dtypes: str | None,
    log_path: str | None,
) -> tuple[list[Finding], dict[str, Any]]:
    from kvferry.audit.protocols import PROTOCOLS, replica_floor
    from kvferry.audit.protocols import audit as run_audit
    from kvferry.evidence.log import ResultLog
    from kvferry.hf.models import load_model

    unknown = [one for one in protocols if one not in PROTOCOLS]
    if unknown:
        raise InvalidInput(f"unknown protocol {', '.join(unknown)}: {', '.join(PROTOCOLS)} are")
    chosen = _names(dtypes) or (common.dtype,)
    wrong = [one for one in chosen if one is not None and one not in EXACT_DTYPES]
    if wrong:
        raise InvalidInput(f"unknown dtype {', '.join(wrong)}: {', '.join(EXACT_DTYPES)} are")
    findings: list[Finding] = []
    with ResultLog(log_path) as log:
        for asked in chosen:
            common.dtype = asked
            dtype, attn = common.fill_defaults()
            with working("loading the model"):
                loaded, tokenizer = load_model(name, dtype=dtype, attn=attn)
            passages = _passages(tokenizer, words, tasks, sizes)
            with progress() as on_progress:
                result = run_audit(
                    loaded, protocols=protocols, passages=passages, settings=settings, log=log, on_progress=on_progress
                )
            findings += result.findings
    if dtypes is not None:
        common.dtype = ",".join(str(one) for one in chosen)
    return findings, replica_floor(findings)


def _given(
    common: Common, name: str, packet: str | None, cache: str | None, settings: Settings
) -> tuple[list[Finding], dict[str, Any]]:
    from kvferry.audit.codec import audit_packet
    from kvferry.audit.given import audit_cache
    from kvferry.audit.models import ModelSet
    from kvferry.audit.protocols import replica_floor
    from kvferry.hf.models import load_model
    from kvferry.ship.packet import Packet
    from kvferry.snapshot import Snapshot

    given: Packet | Snapshot
    if packet is not None:
        check_kind(packet, "packet", snapshot="give it with --cache")
        given = Packet.load(packet)
        identity = given.header.identity
    else:
        assert cache is not None
        check_kind(cache, "snapshot", packet="give it with --packet")
        given = Snapshot.load(cache)
        identity = given.identity
    dtype, attn = common.fill_defaults(identity.dtype, identity.attention)
    with working("loading the model"):
        loaded, _ = load_model(name, dtype=dtype, attn=attn)
    models, new = ModelSet(loaded), settings.new_tokens
    with progress() as on_progress:
        if isinstance(given, Packet):
            finding = audit_packet(models, given, new_tokens=new, on_progress=on_progress)
        else:
            finding = audit_cache(models, given, new_tokens=new, on_progress=on_progress)
    return [finding], replica_floor([finding])


def _passages(
    tokenizer: Any, words: str | None, tasks: tuple[str | None, int | None], sizes: tuple[int, int, int]
) -> list[Passage]:
    from kvferry.audit.passages import passages_of_tasks, passages_of_text
    from kvferry.hf.text import default_text

    n, prefix, suffix = sizes
    path, longest = tasks
    if path is not None:
        return passages_of_tasks(tokenizer, path, n, longest)
    return passages_of_text(tokenizer, words or default_text(), n=n, prefix=prefix, suffix=suffix)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def show_findings(findings: list[Finding]) -> None:
    """A line a finding, then the evidence of each."""
    head = ("protocol", "arms", "verdict", "layer", "tensor", "n", "what most matters")
    lines = []
    for finding in findings:
        arm = finding.arms[-1]
        shown = [f"{name}={arm[name]}" for name in arm if name not in ("attn", "threads")]
        lines.append(
            (
                finding.protocol,
                " ".join(shown),
                finding.verdict,
                "" if finding.layer is None else str(finding.layer),
                finding.tensor or "",
                str(finding.n),
                "; ".join(_short(finding, name) for name in HEADLINES if name in finding.measures),
            )
        )
    tables.show_rows(head, lines)
    for finding in findings:
        tables.show_text(f"{finding.protocol}: {finding.verdict}", "\n".join(f"- {why}" for why in finding.reasons))


HEADLINES = (
    "flip_rate",
    "max_abs_median_of_sequences",
    "cache_l2_median",
    "suffix_differs",
    "prompts_diverging",
    "whole: logits to the bit",
    "restored_same_step_last_layer_median",
    "restored_later_steps_last_layer_median",
    "cache_l2",
)
"""Measures that the table shows, where a finding has them."""


def _short(finding: Finding, name: str) -> str:
    measure = finding.measures[name]
    interval = "" if measure.ci is None else f" [{measure.ci[0]:.3g}, {measure.ci[1]:.3g}]"
    return f"{name.replace('_', ' ')} {tables.small(measure.value)}{interval} (n={measure.n})"
