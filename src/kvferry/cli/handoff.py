"""``kvferry handoff``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvferry.channel import LIVE
from kvferry.cli import tables
from kvferry.cli.common import FRAME_TOKENS, POLICY_HELP, Common, check_int4, command, int4_option, model_options
from kvferry.engines.handoff.job import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, HandoffJob
from kvferry.errors import InvalidInput
from kvferry.report.tables import brief_quantizers

if TYPE_CHECKING:
    from kvferry.engines.handoff.result import HandoffResult


@command("handoff")
@click.argument("model", required=False)
@click.option("--prefill", metavar="A", help="Instead of MODEL: the producer's.")
@click.option("--decode", metavar="B", help="The consumer's model. [default: the producer's]")
@click.option("--budget", type=float, help="Bytes over those of the 16-bit packet, at most, all overhead counted.")
@click.option("--nominal-budget", type=float, help="Instead: the policy's own mean cost of a token.")
@click.option("--policy", default="auto", show_default=True, help=POLICY_HELP)
@click.option("--scorer", help="What ranks tokens. [default: the last queries' attention]")
@click.option("--text", metavar="FILE", help="What to prefill. [default: Python's own reference topics]")
@click.option(
    "--max-tokens", type=int, default=DEFAULT_PROMPT_TOKENS, show_default=True, help="Of the prompt, at most."
)
@click.option("--max-new", type=int, default=DEFAULT_NEW_TOKENS, show_default=True, help="Tokens to decode, at most.")
@click.option("--frame-tokens", type=FRAME_TOKENS, help="Tokens a frame. [default: one frame a layer]")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Longest silence of the other process, in s."
)
@click.option(
    "--pipeline/--no-pipeline",
    default=True,
    show_default=True,
    help="Encode and send each layer while the next one is being prefilled.",
)
@click.option(
    "--progressive",
    is_flag=True,
    help="Go on sending after the first token, until the consumer's cache is the producer's bit for bit.",
)
@click.option("--mapper", metavar="DIR", help="With --prefill A --decode B: maps A's cache to B's, at the consumer.")
@click.option(
    "--gate/--no-gate",
    default=True,
    show_default=True,
    help="Take a mapped cache only where `kvferry map gate` and a check on the spot allow it; else B prefills.",
)
@click.option(
    "--recompute-last", type=click.IntRange(0), default=0, help="Last tokens that B computes anew on the mapped ones."
)
@click.option(
    "--link",
    metavar="RATE",
    help="Between the two, a real link shaped to RATE, as in 100mbit or 1gbit; needs Linux, root and iproute2. "
    "[default: loopback]",
)
@click.option(
    "--channel",
    type=click.Choice(LIVE),
    default="socket",
    show_default=True,
    help="What moves the frames; nixl and mooncake need their packages.",
)
@int4_option
@model_options
def handoff(
    common: Common,
    model: str | None,
    prefill: str | None,
    decode: str | None,
    budget: float | None,
    nominal_budget: float | None,
    policy: str,
    scorer: str | None,
    text: str | None,
    max_tokens: int,
    max_new: int,
    frame_tokens: int | None,
    timeout: float,
    pipeline: bool,
    progressive: bool,
    mapper: str | None,
    gate: bool,
    recompute_last: int,
    link: str | None,
    channel: str,
    int4_allowed: bool | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Prefill with MODEL in one process, decode in another, and judge the result.

    The two share nothing but a socket. The first prefills real text and sends its cache, the second installs it and
    goes on; what comes out is compared with what would have come without shipping. With --mapper the second runs
    another model of the family, and what comes out is compared with its own prefill.
    """
    producer = prefill or model
    if producer is None or (prefill is not None and model is not None):
        raise InvalidInput("give a MODEL, or --prefill A instead")
    if (budget is None) == (nominal_budget is None):
        raise InvalidInput("give --budget or --nominal-budget, one of the two")
    if mapper is not None and (prefill is None or decode is None):
        raise InvalidInput("--mapper maps from one model to another: give --prefill A and --decode B")
    check_int4(int4_allowed, [policy])
    dtype, attn = common.fill_defaults()
    job = HandoffJob(
        producer_model=producer,
        consumer_model=decode or producer,
        budget=budget,
        nominal_budget=nominal_budget,
        policy=policy,
        scorer=scorer,
        text_file=text,
        max_tokens=max_tokens,
        max_new=max_new,
        frame_tokens=frame_tokens,
        dtype=dtype,
        attn=attn,
        threads=common.threads,
        seed=common.seed,
        timeout=timeout,
        int4_allowed=int4_allowed,
        pipeline=pipeline,
        progressive=progressive,
        mapper=mapper,
        gate=gate,
        recompute_last=recompute_last,
        link=link,
        channel=channel,
    )
    from kvferry.engines.handoff.run import run_handoff

    with stages() as on_stage:
        result = run_handoff(job, on_stage)

    def show() -> None:
        show_results([result])
        show_stages(result)
        show_texts(result)

    return result.to_json(), show


@contextmanager
def stages(title: str = "") -> Iterator[Callable[[str, str], None] | None]:
    """What the two processes are at, on standard error; ``None`` where that is no terminal."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    now = {"producer": "starting", "consumer": "starting"}
    with Console(file=sys.stderr).status(title) as status:

        def on_stage(role: str, stage: str) -> None:
            now[role] = stage
            status.update(f"{title} producer: {now['producer']} · consumer: {now['consumer']}".strip())

        yield on_stage


def show_results(results: list[HandoffResult]) -> None:
    """A column a hand-off."""
    from kvferry.engines.handoff.result import SECONDS

    head = ["", *(f"budget {result.budget_asked or result.nominal_budget:g}" for result in results)]
    rows: list[list[str]] = []

    def add(name: str, value: Callable[[HandoffResult], str]) -> None:
        rows.append([name, *(value(result) for result in results)])

    add("prompt tokens", lambda r: f"{r.prompt_tokens:,}")
    add("packet bytes", lambda r: f"{r.packet_bytes:,}")
    add("16-bit packet", lambda r: f"{r.full_bytes:,}")
    add("budget, actual", lambda r: f"{r.budget:.4f}")
    add("budget, nominal", lambda r: f"{r.nominal_budget:.4f}")
    add("policy", lambda r: r.policy)
    add("quantizer", lambda r: brief_quantizers(r.quantizer))
    add("pipelined", lambda r: "yes" if r.pipelined else f"no: {r.why_not_pipelined}")
    if any(result.link for result in results):
        add("link", lambda r: r.link["rate"] if r.link else "loopback")
        add("bytes on the link", lambda r: f"{r.link['bytes_out']:,}" if r.link else "")
    mapped = any(result.stages for result in results)
    for name in [name for name in (*SECONDS[:4], "map", *SECONDS[4:]) if mapped or name != "map"]:
        rows.append([name.replace("_", " "), *(tables.seconds(result.seconds[name]) for result in results)])
    if any(result.progressive for result in results):
        _add_progressive(add)
    add("ttft, its own prefill" if mapped else "ttft unshipped", lambda r: tables.seconds(r.local_seconds["ttft"]))

    def judged(r: HandoffResult, value: float | None) -> str:
        return tables.small(value) + (", once refined" if r.progressive else "")

    add("KL, mean (nats)", lambda r: judged(r, r.kl_mean))
    add("KL, largest", lambda r: judged(r, r.fidelity["kl_max"]))
    add("top-1 agreement", lambda r: judged(r, r.top1_agreement))
    add("tokens equal", lambda r: "yes" if r.tokens_equal else f"no, from token {r.first_difference}")
    tables.show_rows(head, rows)


def _add_progressive(add: Callable[[str, Callable[[HandoffResult], str]], None]) -> None:
    """The rows of hand-offs that went on after the first token."""

    def told(name: str, text: Callable[[dict[str, Any]], str]) -> None:
        add(name, lambda r: "" if r.progressive is None else text(r.progressive))

    told("before the first token", lambda p: f"{p['share_before_first_token']:.4f} of the 16-bit packet")
    told("bytes in all", lambda p: f"{p['total_bytes']:,} ({p['total_budget']:.4f})")
    told("as good as INT8 after", lambda p: tables.seconds(p["seconds"]["level_1"]))
    told("exact after", lambda p: tables.seconds(p["seconds"]["exact"]))
    told("tokens from base, INT8, exact", lambda p: ", ".join(map(str, p["tokens_at_level"])))
    told("bit-exact", lambda p: "yes" if p["bit_exact"] else "no")


def show_stages(result: HandoffResult) -> None:
    """What each stage of a mapped hand-off cost, in bytes, time and fidelity."""
    if result.stages is None:
        return
    rows = []
    for stage in result.stages:
        found = stage["fidelity"]
        rows.append(
            [
                stage["stage"],
                f"{stage['bytes']:,}" if stage["bytes"] else "",
                tables.seconds(stage["seconds"]),
                "" if found is None else tables.small(found["kl_mean"]),
                "" if found is None else tables.small(found["top1_agreement"]),
            ]
        )
    tables.show_rows(["stage", "bytes", "time", "KL, mean (nats)", "top-1 agreement"], rows)
    mapped = next(stage for stage in result.stages if stage["stage"] == "map")
    if not mapped["mapped"]:
        tables.show_text("not mapped, the consumer prefilled", "; ".join(mapped["reasons"]))


def show_texts(result: HandoffResult) -> None:
    """What both runs wrote."""
    tables.show_text("the prompt ends", result.text["prompt_end"])
    tables.show_text("from the shipped cache", result.text["shipped"])
    own = "its own prefill" if result.stages is not None else "unshipped"
    tables.show_text(own, "the same" if result.tokens_equal else result.text["local"])
    if "source" in result.text:
        tables.show_text("the model that prefilled", result.text["source"])
