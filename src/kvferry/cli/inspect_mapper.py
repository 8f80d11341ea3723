"""``kvferry inspect`` of a mapper's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.cli import tables
from kvferry.errors import CorruptPacket


def inspect_mapper(path: str) -> dict[str, Any]:
    """What is in a mapper's folder; ``identity`` is the target's, whose caches it makes.

    Raises:
        InvalidInput: the folder holds no mapper.
    """
    from kvferry.map.mapper import Mapper

    found: dict[str, Any] = dict.fromkeys(("identity", "source", "tokens", "layers", "full_bytes"))
    found |= {"path": path, "kind": "mapper", "checks_failed": False}
    try:
        mapper = Mapper.from_pretrained(Path(path))
    except CorruptPacket as error:
        nbytes = _bytes(path)
        problem = {"checksums_ok": False, "problem": str(error), "checks_failed": True}
        return found | {"bytes": nbytes, "file_bytes": nbytes} | problem
    nbytes = _bytes(path)
    return found | {
        "identity": mapper.target.to_dict(),
        "source": mapper.source.to_dict(),
        "layers": len(mapper.target.layers),
        "bytes": nbytes,
        "file_bytes": nbytes,
        "checksums_ok": True,
        "digest": mapper.digest,
        "variant": mapper.recipe.variant,
        "top_k": mapper.recipe.top_k,
        "ridge": mapper.recipe.ridge,
        "sources": mapper.recipe.sources,
        "native_prefix": mapper.recipe.native_prefix,
        "parameters": mapper.parameters,
        "parts": len(mapper.parts),
        "made": dict(mapper.made),
    }


def show_mapper(result: dict[str, Any]) -> None:
    """Print it for a person."""
    if not result["checksums_ok"]:
        tables.show_pairs({name: result[name] for name in ("path", "kind", "bytes", "checksums_ok", "problem")})
        return
    tables.show_pairs(
        {
            "path": result["path"],
            "kind": "mapper",
            "from": f"{result['source']['model']} ({result['source']['weights']})",
            "to": f"{result['identity']['model']} ({result['identity']['weights']})",
            "digest": result["digest"],
            "variant": f"{result['variant']}, {result['top_k'] or 'all'} source layers, ridge {result['ridge']:g}",
            "first tokens": f"{result['native_prefix']} are left to the target",
            "parameters": f"{result['parameters']:,}",
            "made of": ", ".join(f"{name} {value}" for name, value in result["made"].items()),
            "bytes": tables.number_of_bytes(result["bytes"]),
            "checksums": "all match",
        }
    )


def _bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).iterdir() if file.is_file())
