"""``kvferry ship``: encode, decode; sweep and probe have files of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import calibrate, probe, sweep, tables
from kvferry.cli.common import (
    FRAME_TOKENS,
    POLICY_HELP,
    SEED,
    Common,
    check_int4,
    check_kind,
    check_output,
    command,
    int4_option,
    working,
)
from kvferry.errors import InvalidInput
from kvferry.report.tables import brief_quantizers

if TYPE_CHECKING:
    from kvferry.ship.packet import Packet
    from kvferry.ship.refine import Refinement
    from kvferry.snapshot import Snapshot

REFINEMENT_SUFFIX = ".refinement"


@click.group("ship")
def ship() -> None:
    """Encode a cache in fewer bytes, and decode it."""


ship.add_command(sweep.sweep)
ship.add_command(probe.probe)
ship.add_command(calibrate.calibrate)


@ship.add_command
@command("ship encode")
@click.argument("path", metavar="SNAPSHOT")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the packet.")
@click.option("--budget", type=float, help="Bytes over those of the 16-bit packet, at most, all overhead counted.")
@click.option("--nominal-budget", type=float, help="Instead: the policy's own mean cost of a token.")
@click.option("--policy", default="auto", show_default=True, help=POLICY_HELP)
@click.option("--scorer", help="What ranks tokens. [default: the last queries' attention, else norms]")
@click.option("--decay", type=float, help="λ of the scorer. [default: its own]")
@click.option("--frame-tokens", type=FRAME_TOKENS, help="Tokens a frame. [default: one frame a layer]")
@click.option(
    "--progressive",
    is_flag=True,
    help=f"Write a second file, FILE{REFINEMENT_SUFFIX}, that brings the decoded packet to all bits.",
)
@click.option("--transform", metavar="FILE", help="For policies klt and auto. [default: the newest kept of the model]")
@int4_option
@click.option("--seed", type=SEED, default=0, show_default=True, help="For the policy random_tier.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads to compute with.")
def encode(
    common: Common,
    path: str,
    output: str,
    budget: float | None,
    nominal_budget: float | None,
    policy: str,
    scorer: str | None,
    decay: float | None,
    frame_tokens: int | None,
    progressive: bool,
    transform: str | None,
    int4_allowed: bool | None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Encode a SNAPSHOT into a packet of at most a given size."""
    if (budget is None) == (nominal_budget is None):
        raise InvalidInput("give --budget or --nominal-budget, one of the two")
    check_int4(int4_allowed, [policy])
    if progressive and policy == "auto":
        policy = "fast"  # what klt writes cannot be refined
    if progressive and policy == "klt":
        raise InvalidInput(
            "a packet of policy klt cannot be refined, as its last bits hang on the machine that decodes it: "
            "leave --progressive out, or take another policy"
        )
    read = [path] if transform is None else [path, transform]
    check_output(output, *read)
    if progressive:
        check_output(output + REFINEMENT_SUFFIX, *read)
    check_kind(path, "snapshot")
    if transform is not None:
        check_kind(transform, "transform")
    from kvferry.evaluate.kept import Int4Answer, int4_answer
    from kvferry.ship.encode import encode as encode_snapshot
    from kvferry.snapshot import Snapshot

    snapshot = Snapshot.load(path)
    answer = int4_answer(snapshot.identity, int4_allowed) if policy == "adaptive" else Int4Answer(True)
    common.set_threads()
    with working("encoding"):
        began = time.perf_counter()
        packet = encode_snapshot(
            snapshot,
            budget,
            policy,
            scorer,
            nominal_budget=nominal_budget,
            seed=common.seed,
            frame_tokens=frame_tokens,
            decay=decay,
            quantizers=answer.quantizers,
            int4_allowed=answer.allowed,
            transform=transform,
        )
        seconds = time.perf_counter() - began
    refinement, refining = _refined(snapshot, packet) if progressive else (None, 0.0)
    size = packet.save(output)
    refined = None if refinement is None else _saved(refinement, output + REFINEMENT_SUFFIX, refining)
    return _answer(packet, output, size, seconds, "encode", refined)


@ship.add_command
@command("ship decode")
@click.argument("path", metavar="PACKET")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the snapshot.")
@click.option("--refinement", metavar="FILE", help="What `ship encode --progressive` wrote beside the packet.")
@click.option(
    "--level", type=click.IntRange(1, 2), help="How far to refine: 1, as good as INT8; 2, every bit. [default: 2]"
)
@click.option("--transform", metavar="FILE", help="Of a packet of policy klt. [default: the kept one that it names]")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads to compute with.")
def decode(
    common: Common, path: str, output: str, refinement: str | None, level: int | None, transform: str | None
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Decode a PACKET into a snapshot; with its refinement, into the very cache that was encoded."""
    if level is not None and refinement is None:
        raise InvalidInput("--level says how far to refine: give --refinement FILE with it")
    check_output(output, path, *(file for file in (refinement, transform) if file is not None))
    for file, kind in ((path, "packet"), (refinement, "refinement"), (transform, "transform")):
        if file is not None:
            check_kind(file, kind)
    from kvferry.ship.encode import decode as decode_packet
    from kvferry.ship.packet import Packet
    from kvferry.ship.refine import Refinement

    packet = Packet.load(path)
    if transform is not None and packet.policy not in ("klt", "full"):  # at a budget of 1, klt writes a packet of full
        raise InvalidInput(f"{path} is of policy {packet.policy}, which has no transform: leave --transform out")
    loaded = None if refinement is None else Refinement.load(refinement)
    common.set_threads()
    with working("decoding"):
        began = time.perf_counter()
        if loaded is None:
            snapshot = decode_packet(packet, transform=transform)
        else:
            snapshot = loaded.apply(packet, level=level or 2)
        seconds = time.perf_counter() - began
    size = snapshot.save(output)
    refined = None
    if loaded is not None:
        refined = {"path": refinement, "bytes": len(loaded), "level": level or 2, "bit_exact": level != 1}
    return _answer(packet, output, size, seconds, "decode", refined)


def _refined(snapshot: Snapshot, packet: Packet) -> tuple[Refinement, float]:
    """The refinement of ``packet``, and the seconds that it took: nothing is written before both can be."""
    from kvferry.ship.refine import refine

    with working("refining"):
        began = time.perf_counter()
        return refine(snapshot, packet), time.perf_counter() - began


def _saved(refinement: Refinement, path: str, seconds: float) -> dict[str, Any]:
    """Write the refinement; what there is to say of it."""
    size = refinement.save(path)
    return {
        "path": path,
        "bytes": len(refinement),
        "level_bytes": list(refinement.level_bytes),
        "file_bytes": size,
        "seconds": seconds,
    }


def _answer(
    packet: Packet, path: str, size: int, seconds: float, verb: str, refined: dict[str, Any] | None
) -> tuple[dict[str, Any], Callable[[], None]]:
    result = {
        "path": path,
        "bytes": len(packet),
        "file_bytes": size,
        "full_bytes": packet.full_bytes,
        "budget": packet.budget,
        "nominal_budget": packet.nominal_budget,
        "policy": packet.policy,
        "quantizer": packet.quantizer,
        "report": packet.report,
        "seconds": seconds,
    }
    if refined is not None:
        refined["total_budget"] = (len(packet) + refined["bytes"]) / packet.full_bytes
        result["refinement"] = refined

    def show() -> None:
        pairs: dict[str, object] = {
            "path": path,
            "packet bytes": tables.number_of_bytes(len(packet)),
            "file bytes": tables.number_of_bytes(size),
            "16-bit packet": tables.number_of_bytes(packet.full_bytes),
            "budget": f"{packet.budget:.4f} (nominal {packet.nominal_budget:.4f})",
            "policy": packet.policy,
            "quantizer": brief_quantizers(packet.quantizer),
            verb: tables.seconds(seconds),
        }
        if refined is not None:
            pairs |= {
                "refinement": refined["path"],
                "refinement bytes": tables.number_of_bytes(refined["bytes"]),
                "both together": f"{refined['total_budget']:.4f} of the 16-bit packet",
            }
        if verb == "decode" and refined is not None:
            pairs["bit-exact"] = "yes, by the sender's digest" if refined["bit_exact"] else "no, level 1"
        tables.show_pairs(pairs)

    return result, show
