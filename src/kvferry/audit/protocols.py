"""The verb: run protocols on a model, and gather what they find."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kvferry.audit import pairs, self_check
from kvferry.audit.finding import Finding
from kvferry.audit.free_run import free_run
from kvferry.audit.models import ModelSet
from kvferry.audit.passages import Passage, passages_of_ids
from kvferry.audit.residual_patch import residual_patch
from kvferry.audit.settings import Settings
from kvferry.audit.study import OnProgress, Study
from kvferry.audit.transplant import transplant
from kvferry.errors import InvalidInput
from kvferry.evidence.log import ResultLog, code_digest, digest
from kvferry.evidence.machine import cpu_name, git_revision
from kvferry.evidence.statistics import wilson
from kvferry.hf.models import loaded_as
from kvferry.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Protocol:
    """``run`` gives findings.

    Attributes:
        run: the protocol.
        steps: that it takes beside its pairs.
        pairs: of arms that it holds against each other on every passage.
    """

    run: Callable[[Study], list[Finding]]
    steps: Callable[[Study], int] = lambda study: 0  # noqa: ARG005
    pairs: Callable[[Study], pairs.Pairs] = lambda study: []  # noqa: ARG005


def _passages(study: Study) -> int:
    return len(study.passages)


PROTOCOLS: dict[str, Protocol] = {
    "fixed_prefix": Protocol(pairs.fixed_prefix, pairs=pairs.fixed_prefix_pairs),
    "free_run": Protocol(free_run, lambda study: len(study.settings.samplers) * len(study.passages)),
    "stage_replay": Protocol(
        pairs.stage_replay, lambda study: len(pairs.STAGES) * len(study.passages), pairs.stage_pairs
    ),
    "precision_2x2": Protocol(pairs.precision_2x2, pairs=pairs.precision_pairs),
    "transplant": Protocol(transplant, _passages),
    "residual_patch": Protocol(residual_patch, _passages),
    "batch": Protocol(pairs.batch, pairs=pairs.batch_pairs),
    "self_check": Protocol(self_check.self_check, self_check.steps),
}
"""Name -> protocol."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Findings, in the order of the protocols, and the floor below which nothing is claimed.

    It is a sequence of its findings.
    """

    findings: tuple[Finding, ...]
    replica_floor: dict[str, Any]
    settings: Settings

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: int) -> Finding:
        return self.findings[index]

    @property
    def sound(self) -> bool:
        """Whether nothing is semantic, nothing overflowed, and every planted fault was caught."""
        return not any(finding.bad for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "replica_floor": self.replica_floor,
            "sound": self.sound,
            "settings": self.settings.to_json(),
        }


def audit(
    model: PreTrainedModel,
    token_ids: Tensor | None = None,
    *,
    protocols: Sequence[str] = ("fixed_prefix",),
    start: int | None = None,
    passages: Sequence[Passage] | None = None,
    settings: Settings | None = None,
    log: ResultLog | None = None,
    on_progress: OnProgress | None = None,
) -> AuditResult:
    """Measure, locate and explain what the cache of ``model`` differs by from recomputation.

    Args:
        model: a causal language model.
        token_ids: ``(sequences, length)`` or ``(length,)``.
        protocols: names in `PROTOCOLS`.
        start: tokens of the prefix; by default two thirds.
        passages: sequences of their own lengths, instead of ``token_ids``.
        settings: sizes, controls and seeds.
        log: where records are kept, and taken up from; in memory by default.
        on_progress: called with steps done, steps in all, and what is being done.

    Raises:
        InvalidInput: an unknown protocol, nothing to run on, or both ``token_ids`` and ``passages``.
        UnsupportedCache: a model whose cache or layers are of a kind that is not known.
    """
    if (token_ids is None) == (passages is None):
        raise InvalidInput("give token_ids or passages to run on, one of them")
    unknown = [name for name in protocols if name not in PROTOCOLS]
    if unknown or not protocols:
        raise InvalidInput(f"unknown protocol {', '.join(unknown) or '(none given)'}: {', '.join(PROTOCOLS)} are")
    chosen = list(passages) if passages is not None else passages_of_ids(token_ids, start)  # type: ignore[arg-type]
    if not chosen:
        raise InvalidInput("there is no sequence to run on")
    study = study_of(model, chosen, settings or Settings(), ResultLog(None) if log is None else log, on_progress)
    asked = [PROTOCOLS[name] for name in protocols]
    together = list({(str(a), str(b)): (a, b) for one in asked for a, b in one.pairs(study)}.values())
    study.total = len(together) * len(chosen) + sum(one.steps(study) for one in asked)
    pairs.run_together(study, together)
    findings = tuple(finding for one in asked for finding in one.run(study))
    return AuditResult(findings, replica_floor(findings), study.settings)


def study_of(
    model: PreTrainedModel,
    passages: list[Passage],
    settings: Settings,
    log: ResultLog,
    on_progress: OnProgress | None,
) -> Study:
    """A study of ``model``; its subject is the weights, dtype, backend, threads, processor and code."""
    import torch

    models = ModelSet(model)
    identity = models.identity(model)
    known = loaded_as(model)
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    environment = {
        "dtype": identity.dtype,
        "attn": identity.attention,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": identity.transformers,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(model.device),
    }
    # `ship` is what codecs and planted quantisers run through.
    code = code_digest("audit", "hf", "ship", "snapshot")
    told = {
        "model": identity.model,
        "weights": identity.weights,
        "kvferry": __version__,
        "git_revision": git_revision(),
    }
    return Study(
        models=models,
        passages=passages,
        settings=settings,
        log=log,
        subject=digest([identity.weights, environment, code]),
        environment={**told, "code": code, **environment},
        ends=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        read=None if known is None else lambda tokens: str(known.tokenizer.decode(tokens, skip_special_tokens=True)),
        on_progress=on_progress,
    )


def replica_floor(findings: Sequence[Finding]) -> dict[str, Any]:
    """How often the same path twice gave the same bits, and by how much it was off where not: no claim is finer."""
    told = [finding for finding in findings if finding.replicas is not None]
    runs = sum(sum(finding.verdicts.values()) if finding.protocol != "transplant" else finding.n for finding in told)
    equal = sum(finding.replicas or 0 for finding in told)
    sizes = {
        name: max((one.measures[key].value or 0.0 for one in told if key in one.measures), default=0.0)
        for name, key in (("max_abs", "replica_max_abs"), ("relative_l2", "replica_relative_l2"))
    }
    return {
        "deterministic": equal == runs,
        "n": runs,
        "equal": equal,
        "differing_ci": list(wilson(runs - equal, runs)) if runs else None,
        **sizes,
        "note": "every pair of arms ran twice from disjoint storage"
        if equal == runs
        else f"the same path twice gave other bits, up to {sizes['max_abs']:.3g} in a logit and "
        f"{sizes['relative_l2']:.3g} in relative L2 of a layer: nothing finer is claimed",
    }
