"""``kvferry inspect``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import tables
from kvferry.cli.common import Common, command
from kvferry.errors import CorruptPacket, InvalidInput, KVFerryError
from kvferry.report.tables import brief_quantizers

if TYPE_CHECKING:
    from kvferry.snapshot.header import Header


@command("inspect")
@click.argument("path", metavar="FILE")
def inspect(common: Common, path: str) -> tuple[dict[str, Any], Callable[[], None]]:  # noqa: ARG001
    """Say what is in FILE, a snapshot, a packet, a refinement, a transform or a mapper's folder; verify every checksum.

    Status 1 when the file is damaged; what its header says is shown where the header itself is whole.
    """
    if Path(path).is_dir():
        from kvferry.cli.inspect_mapper import inspect_mapper, show_mapper

        mapper = inspect_mapper(path)
        return mapper, lambda: show_mapper(mapper)
    from kvferry.snapshot.container import peek

    result: dict[str, Any] = dict.fromkeys(("identity", "tokens", "layers", "full_bytes"))
    try:
        header = peek(path)
    except CorruptPacket as error:
        kind = _kind_of_damaged(path)
        if kind is None:
            raise
        result |= {"path": path, "kind": kind, **_damaged(error)}
        result["bytes"] = result["file_bytes"] = Path(path).stat().st_size
    else:
        if header.kind not in _READERS:
            raise InvalidInput(f"{path} is a {header.kind}; {', '.join(_READERS)} are what can be inspected")
        result |= {"path": path, "kind": header.kind, "bytes": header.nbytes, "file_bytes": header.nbytes}
        try:
            result |= _READERS[header.kind](path) | {"checksums_ok": True}
        except CorruptPacket as error:
            result |= _SUMMARIES[header.kind](path, header) | _damaged(error)

    def show() -> None:
        _show(result)

    return result, show


def _snapshot(path: str) -> dict[str, Any]:
    from kvferry.snapshot import Snapshot

    snapshot = Snapshot.load(path)
    return {
        "identity": snapshot.identity.to_dict(),
        "batch": snapshot.batch_size,
        "tokens": snapshot.seq_len,
        "layers": len(snapshot.layers),
        "full_bytes": snapshot.nbytes,
        "queries": max((layer.queries.shape[2] for layer in snapshot.layers if layer.queries is not None), default=0),
        "kinds": _kinds([str(layer.kind) for layer in snapshot.layers]),
    }


def _packet(path: str) -> dict[str, Any]:
    from kvferry.ship.layout import WHOLE
    from kvferry.ship.packet import Packet

    packet = Packet.load(path)
    return {
        "identity": packet.identity.to_dict(),
        "batch": packet.header.batch,
        "tokens": packet.header.seq_len,
        "layers": len(packet.identity.layers),
        "packet_bytes": len(packet),
        "full_bytes": packet.full_bytes,
        "budget": packet.budget,
        "nominal_budget": packet.nominal_budget,
        "policy": packet.policy,
        "quantizer": packet.quantizer,
        "report": packet.report,
        "frames": len(packet.frames),
        "kinds": _kinds([str(layer.kind) for layer in packet.identity.layers]),
        "bits_by_layer": packet.bits_by_layer(),
        "layers_share_frames": packet.header.layout.cut == WHOLE,
    }


def _refinement(path: str) -> dict[str, Any]:
    """A refinement knows its packet by its id alone: whose cache it is, the packet says."""
    from kvferry.ship.refine import Refinement

    refinement = Refinement.load(path)
    return {
        "batch": refinement.header.batch,
        "tokens": refinement.header.seq_len,
        "refinement_bytes": len(refinement),
        "level_bytes": list(refinement.level_bytes),
        "base_packet": refinement.header.base.hex(),
        "frames": len(refinement.frames),
    }


def _transform(path: str) -> dict[str, Any]:
    from kvferry.ship.transform.artifact import Transform

    transform = Transform.load(path)
    return {
        "identity": transform.identity.to_dict(),
        "layers": len(transform.identity.layers),
        "digest": transform.digest,
        "made": dict(transform.made),
        "kinds": _kinds([str(layer.kind) for layer in transform.identity.layers]),
        "groups": [
            {"side": "keys" if group.keys else "values", "layers": list(group.layers), "channels": group.width}
            for group in (basis.group for basis in transform.bases)
        ],
    }


def _transform_summary(path: str, header: Header) -> dict[str, Any]:  # noqa: ARG001
    """What the header of a transform's file says of its model, when its tensors are damaged."""
    from kvferry.snapshot import Identity

    try:
        identity = Identity.from_json(header.metadata["identity"])
    except (CorruptPacket, KeyError):
        return {}
    return {"identity": identity.to_dict(), "layers": len(identity.layers)}


def _refinement_summary(path: str, header: Header) -> dict[str, Any]:  # noqa: ARG001
    """Without its frames, its header has little to say."""
    return {}


def _damaged(error: CorruptPacket) -> dict[str, Any]:
    return {"checksums_ok": False, "problem": str(error), "checks_failed": True}


def _kind_of_damaged(path: str) -> str | None:
    """What a file with a damaged header was to hold, where its first bytes still say so."""
    with Path(path).open("rb") as file:
        mark = _MARK.search(file.read(512))
    return mark[1].decode("ascii") if mark is not None else None


def _snapshot_summary(path: str, header: Header) -> dict[str, Any]:  # noqa: ARG001
    """What the header of a snapshot's file says of it, when its tensors are damaged."""
    from kvferry.snapshot import Identity

    try:
        identity = Identity.from_json(header.metadata["identity"])
        batch, seq_len = header.tensors["token_ids"].shape
    except (CorruptPacket, KeyError, ValueError):
        return {}
    caches = [info for name, info in header.tensors.items() if name.endswith((".keys", ".values"))]
    return {
        "identity": identity.to_dict(),
        "batch": batch,
        "tokens": seq_len,
        "layers": len(identity.layers),
        "full_bytes": sum(info.end - info.begin for info in caches),
    }


def _packet_summary(path: str, header: Header) -> dict[str, Any]:
    """What the packet's header says of it, when frames are damaged."""
    from kvferry.ship.header import parse_header
    from kvferry.ship.sizing import HEADER_TENSOR

    try:
        info = header.tensors[HEADER_TENSOR]
        with Path(path).open("rb") as file:
            file.seek(header.payload_start + info.begin)
            packet = parse_header(file.read(info.end - info.begin))
    except (KVFerryError, KeyError):
        return {}
    return {
        "identity": packet.identity.to_dict(),
        "batch": packet.batch,
        "tokens": packet.seq_len,
        "layers": len(packet.identity.layers),
        "packet_bytes": packet.nbytes + packet.payload_bytes,
        "full_bytes": packet.full_bytes,
        "nominal_budget": packet.nominal_budget,
        "policy": packet.policy,
    }


_MARK = re.compile(rb'"format":"kvferry","kind":"(snapshot|packet|refinement|transform)"')
_SUMMARIES: dict[str, Callable[[str, Header], dict[str, Any]]] = {
    "snapshot": _snapshot_summary,
    "packet": _packet_summary,
    "refinement": _refinement_summary,
    "transform": _transform_summary,
}
_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "snapshot": _snapshot,
    "packet": _packet,
    "refinement": _refinement,
    "transform": _transform,
}


def _kinds(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _show(result: dict[str, Any]) -> None:
    if not result["checksums_ok"]:
        known: dict[str, object] = {
            "path": result["path"],
            "kind": result["kind"],
            "bytes": tables.number_of_bytes(result["bytes"]),
            "checksums": "the file is damaged",
            "problem": result["problem"],
        }
        if result["identity"] is not None:
            known["model"] = result["identity"]["model"]
            known |= {
                name.replace("_", " "): f"{result[name]:,}"
                for name in ("tokens", "layers", "full_bytes")
                if result[name] is not None
            }
        tables.show_pairs(known)
        return
    if result["kind"] == "refinement":
        _show_refinement(result)
        return
    if result["kind"] == "transform":
        _show_transform(result)
        return
    identity = result["identity"]
    pairs: dict[str, object] = {
        "path": result["path"],
        "kind": result["kind"],
        "model": identity["model"],
        "weights": identity["weights"],
        "dtype": identity["dtype"],
        "construction": " -> ".join(identity["construction"]),
        "tokens": f"{result['tokens']:,}" + (f" in each of {result['batch']} sequences" if result["batch"] > 1 else ""),
        "layers": ", ".join(f"{count} {kind}" for kind, count in result["kinds"].items()),
        "bytes": tables.number_of_bytes(result["bytes"]),
        "full bytes": tables.number_of_bytes(result["full_bytes"]),
        "checksums": "all match",
    }
    if result["kind"] == "packet":
        pairs |= {
            "packet bytes": tables.number_of_bytes(result["packet_bytes"]),
            "budget": f"{result['budget']:.4f} (nominal {result['nominal_budget']:.4f})",
            "policy": result["policy"],
            "quantizer": brief_quantizers(result["quantizer"]),
        }
    tables.show_pairs(pairs)
    if result["kind"] == "packet":
        rows = [
            (str(row["layer"]), row["kind"], f"{row['bits']:.2f}", _counts(row["keys"]), _counts(row["values"]))
            for row in result["bits_by_layer"]
        ]
        if result["layers_share_frames"]:  # what each of them takes is not known
            rows = [("all", "", *rows[0][2:])]
        tables.show_rows(("layer", "kind", "bits", "tokens of keys", "tokens of values"), rows)


def _show_refinement(result: dict[str, Any]) -> None:
    first, second = result["level_bytes"]
    tables.show_pairs(
        {
            "path": result["path"],
            "kind": "refinement",
            "of packet": result["base_packet"],
            "tokens": f"{result['tokens']:,}" + (f" in each of {result['batch']} sequences" * (result["batch"] > 1)),
            "bytes": tables.number_of_bytes(result["bytes"]),
            "level 1 (INT8)": tables.number_of_bytes(first),
            "level 2 (exact)": tables.number_of_bytes(second),
            "frames": result["frames"],
            "checksums": "all match",
        }
    )


def _show_transform(result: dict[str, Any]) -> None:
    identity = result["identity"]
    tables.show_pairs(
        {
            "path": result["path"],
            "kind": "transform",
            "digest": result["digest"],
            "model": identity["model"],
            "weights": identity["weights"],
            "dtype": identity["dtype"],
            "made of": ", ".join(f"{name} {value}" for name, value in result["made"].items()),
            "layers": ", ".join(f"{count} {kind}" for kind, count in result["kinds"].items()),
            "bytes": tables.number_of_bytes(result["bytes"]),
            "checksums": "all match",
        }
    )
    rows = [
        (group["side"], " ".join(map(str, group["layers"])), f"{group['channels']:,}") for group in result["groups"]
    ]
    tables.show_rows(("side", "layers", "channels"), rows)


def _counts(tiers: dict[str, int]) -> str:
    return ", ".join(f"{count} {spec}" for spec, count in tiers.items())
