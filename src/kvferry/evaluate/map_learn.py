"""Descent that a kill costs a minute: weights, what Adam remembers and what was measured so far lie on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.errors import CorruptPacket
from kvferry.hf.train import Adam
from kvferry.map.train import TrainSettings
from kvferry.snapshot.container import read_container, write_container
from kvferry.snapshot.strict_json import parse_json

KIND = "learning"
KEEP_SECONDS = 60.0
"""Between checkpoints, or so many times as long as the last one took to write as `_RARELY` says."""
_RARELY = 15

OnStep = Callable[[int, int, str], None]
Errors = dict[str, float]


@dataclass(slots=True)
class Course:
    """How a training went.

    Attributes:
        step: steps done; `steps` at most.
        steps: of the whole schedule.
        looks: step, held-out errors and R² of every measurement.
        best: the step whose weights are kept.
        seconds: of work, those before a kill included.
        kills: times that it was taken up again.
    """

    step: int = 0
    steps: int = 0
    looks: list[dict[str, Any]] = field(default_factory=list)
    best: int = 0
    seconds: float = 0.0
    kills: int = 0

    def at(self, step: int) -> dict[str, Any]:
        """What was measured after ``step`` steps."""
        return next(look for look in self.looks if look["step"] == step)


def learn(
    weights: Mapping[str, nn.Parameter],
    descend: Callable[[Tensor, int], float],
    measure: Callable[[], tuple[Errors, dict[str, list[float]]]],
    sequences: Sequence[Tensor],
    settings: TrainSettings,
    *,
    judge: str,
    checkpoint: Path | None = None,
    bound_to: str = "",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Course:
    """Train ``weights`` in place; they end as those of the best measurement, the one before the first step included.

    A process that is killed leaves its last checkpoint; called again with the same arguments, it goes on there and, on
    as many threads, ends with the same bits.

    Args:
        weights: what is trained, by name.
        descend: leaves the gradients of a sequence's loss at the weights, given the step too.
        measure: held-out errors, and R².
        sequences: token ids; in an order of its own each epoch.
        settings: how long and how fast, and after how many measurements without a better one to stop.
        judge: the error that decides.
        checkpoint: file to go on from and to keep the state in; the best weights lie beside it.
        bound_to: names all that it hangs on; a checkpoint of another name is not taken up.
        seed: of the order.
        on_step: told ``(done, in all, at what)``.

    Raises:
        CorruptPacket: a damaged checkpoint, or one of something else.
        InvalidInput: a gradient that is not finite.
    """
    state = Adam(weights)
    course = Course(steps=settings.epochs * len(sequences))
    found = None if checkpoint is None or not checkpoint.exists() else _resume(state, checkpoint, bound_to)
    began = time.perf_counter()
    if found is not None:
        course = found
    kept_at, before, price = began, course.seconds, 0.0
    every = max(1, len(sequences) // settings.looks)
    best = None if checkpoint is None else checkpoint.with_suffix(".best.safetensors")
    memory: dict[str, Tensor] = {}

    def look() -> None:
        errors, r2 = measure()
        course.looks.append({"step": course.step, "errors": errors, "r2": r2})
        if _better(errors[judge], course.at(course.best)["errors"][judge]) or course.step == 0:
            course.best = course.step
            if best is None:
                memory.update({name: weight.detach().clone() for name, weight in weights.items()})
            else:
                write_container(best, KIND, {n: w.detach() for n, w in weights.items()}, {"bound_to": bound_to})

    if not course.looks:
        look()
    order: dict[int, list[int]] = {}
    while course.step < course.steps and _hopeful(course, settings.patience):
        epoch = course.step // len(sequences)
        if epoch not in order:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = {epoch: torch.randperm(len(sequences), generator=generator).tolist()}
        loss = descend(sequences[order[epoch][course.step % len(sequences)]], course.step)
        state.step(settings.rate_at(course.step, course.steps))
        course.step += 1
        if on_step is not None:
            on_step(course.step, course.steps, f"training, loss {loss:.4f}")
        ended = course.step == course.steps
        if ended or course.step % every == 0:
            look()
        now = time.perf_counter()
        course.seconds = before + now - began
        if checkpoint is not None and (ended or now - kept_at >= max(KEEP_SECONDS, _RARELY * price)):
            _keep(state, course, checkpoint, bound_to)
            kept_at = time.perf_counter()
            price = kept_at - now
    course.seconds = before + time.perf_counter() - began
    own = memory if best is None else dict(_read(best, bound_to).tensors)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(own[name])
    return course


def _better(error: float, than: float) -> bool:
    return math.isfinite(error) and not error >= than


def _hopeful(course: Course, patience: int) -> bool:
    return len([look for look in course.looks if look["step"] > course.best]) < patience


def _keep(state: Adam, course: Course, path: Path, bound_to: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_container(path, KIND, state.tensors(), {"course": json.dumps(asdict(course)), "bound_to": bound_to})


def _read(path: Path, bound_to: str) -> Any:
    found = read_container(path, kind=KIND)
    if found.metadata.get("bound_to") != bound_to:
        raise CorruptPacket(f"{path} is a checkpoint of another training: remove it, or start elsewhere")
    return found


def _resume(state: Adam, path: Path, bound_to: str) -> Course:
    found = _read(path, bound_to)
    try:
        course = Course(**parse_json(found.metadata.get("course", "null"), "the checkpoint's course", most=1 << 16))
    except TypeError as error:
        raise CorruptPacket(f"{path} is no checkpoint that fits together: {error}") from error
    state.load(found.tensors, course.step)
    course.kills += 1
    return course
