"""Where a sweep keeps its results, and which code they count for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.evidence import log
from kvferry.evidence.log import digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvferry.evaluate.sweep import SweepSettings


def code_digest() -> str:
    """Digest of the files that sweeps and probes depend on."""
    return log.code_digest("ship", "snapshot", "evaluate", "hf")


def default_log(model: PreTrainedModel, settings: SweepSettings, *texts: str | None) -> Path:
    """Where a sweep of these very settings, this model and these texts keeps its results, in kvferry's cache folder."""
    from kvferry.hf.identity import identity_of
    from kvferry.snapshot.folders import cache_folder

    identity = identity_of(model)
    name = digest([identity.weights, identity.dtype, identity.attention, asdict(settings), [digest(t) for t in texts]])
    return cache_folder() / "sweeps" / f"{name}.jsonl"
