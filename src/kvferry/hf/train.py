"""Training on a CPU: weights and their averages in float32, products in the model's dtype, no work lost to a kill."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.snapshot.container import StrPath, read_container, write_container
from kvferry.snapshot.strict_json import parse_json

KIND = "training"

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_MOST_NORM = 1.0

_STOPPED = 8
"""Times the usual duration that a step may take and still count in full."""
_USUAL = 4
"""Steps after which it is known what is usual."""

OnStep = Callable[["Progress"], None]
Loss = Callable[[Int[Tensor, "batch tokens"]], Tensor]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How long and how fast; training ends with whichever of ``tokens`` and ``minutes`` is up first.

    Attributes:
        tokens: to train on, over and over where the text has fewer.
        minutes: of wall time, those before a kill included; not those for which the process or the machine was stopped.
        batch: windows a step.
        rate: learning rate at its highest, reached by a straight line and left by another down to nothing.
        warmup: share of the training that the way up takes.
        keep_minutes: between checkpoints.
        seed: of the order of the windows.
    """

    tokens: int | None = None
    minutes: float | None = None
    batch: int = 4
    rate: float = 6e-4
    warmup: float = 0.04
    keep_minutes: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens is None and self.minutes is None:
            raise InvalidInput("training needs an end: a number of tokens, of minutes, or both")
        for name in ("tokens", "minutes", "batch", "rate", "keep_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(f"{name} is {value}; it must be positive")
        if not 0 <= self.warmup < 1:
            raise InvalidInput(f"warmup is {self.warmup}; it must be a share from 0 up to 1")

    def done(self, tokens: int, seconds: float) -> float:
        """Share of the training that is done, at most 1."""
        shares = [0.0]
        if self.tokens is not None:
            shares.append(tokens / self.tokens)
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        return min(1.0, max(shares))

    def rate_at(self, done: float) -> float:
        """Learning rate when a share ``done`` of the training is over."""
        if done < self.warmup:
            # A first step at a rate of exactly 0 would be lost.
            return self.rate * max(done, 0.02 * self.warmup) / self.warmup
        return self.rate * (1 - done) / (1 - self.warmup)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training stands.

    Attributes:
        step, tokens: done so far.
        seconds, cpu_seconds: spent so far, those before a kill included.
        done: share of the training, 0 to 1.
        loss: running mean over the last some fifty steps.
        resumed: tokens that an earlier process had done.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    done: float = 0.0
    loss: float = math.nan
    resumed: int = 0

    @property
    def seconds_left(self) -> float:
        """By the pace so far; infinite before the first step."""
        return self.seconds * (1 - self.done) / self.done if self.done > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Adam:
    """Adam on float32 copies of a model's trainable weights, which hold the dtype that products are done in.

    Source: 'Adam: A Method for Stochastic Optimization' (1412.6980), algorithm 1, with the gradient's norm limited.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        self.weights = dict(weights)
        self.step_count = 0
        held: list[Tensor] = list(self.weights.values())
        self.master = [weight.detach().float().clone() for weight in held]
        self.first = [torch.zeros_like(master) for master in self.master]
        self.second = [torch.zeros_like(master) for master in self.master]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step down the gradients that lie at the weights, which are then cleared."""
        held: list[Tensor] = list(self.weights.values())
        gradients = [
            torch.zeros_like(own) if w.grad is None else w.grad.float()
            for own, w in zip(self.master, held, strict=True)
        ]
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        if not math.isfinite(norm):
            raise InvalidInput(f"a gradient is not finite at step {self.step_count}: use a smaller learning rate")
        if norm > _MOST_NORM:
            torch._foreach_mul_(gradients, _MOST_NORM / norm)
        self.step_count += 1
        early, late = _BETAS
        torch._foreach_lerp_(self.first, gradients, 1 - early)
        torch._foreach_mul_(self.second, late)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - late)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scale, math.sqrt(1 - late**self.step_count))
        torch._foreach_add_(scale, _EPSILON)
        torch._foreach_addcdiv_(self.master, self.first, scale, -rate / (1 - early**self.step_count))
        torch._foreach_copy_(held, self.master)
        for weight in held:
            weight.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All state, by name."""
        parts = zip(self.weights, self.master, self.first, self.second, strict=True)
        return {
            f"{kind}.{name}": tensor
            for name, *three in parts
            for kind, tensor in zip(("weight", "first", "second"), three, strict=True)
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], step_count: int) -> None:
        """Take up what `tensors` gave. Raises `CorruptPacket` where it is of other weights."""
        own = self.tensors()
        if set(own) != set(tensors) or any(tensors[name].shape != tensor.shape for name, tensor in own.items()):
            raise CorruptPacket("the checkpoint is of other weights than the model's")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        held: list[Tensor] = list(self.weights.values())
        torch._foreach_copy_(held, self.master)
        self.step_count = step_count


def train(
    weights: Mapping[str, nn.Parameter],
    loss_of: Loss,
    windows: Int[Tensor, "windows tokens"],
    settings: TrainSettings,
    *,
    checkpoint: StrPath | None = None,
    bound_to: str = "",
    on_step: OnStep | None = None,
) -> Progress:
    """Train ``weights`` in place.

    A process that is killed leaves its last checkpoint; called again with the same arguments, the training goes on
    there. Where the end is a number of tokens, it then gives the very bits that it would have given unhindered, on as
    many threads: nothing is random but the order of the windows, which the seed and the position give.

    Args:
        weights: what is trained, by name.
        loss_of: the loss of a batch of windows, to be propagated back.
        windows: token ids.
        settings: how long and how fast.
        checkpoint: file to go on from and to keep the state in; nothing is kept without one.
        bound_to: names model, data and settings; a checkpoint of another name is not taken up.
        on_step: told after each step.

    Raises:
        InvalidInput: no windows, or a gradient that is not finite.
        CorruptPacket: a damaged checkpoint, or one that is of something else.
    """
    if windows.shape[0] == 0:
        raise InvalidInput("there is no window to train on: give more text")
    state = Adam(weights)
    progress = Progress()
    if checkpoint is not None and Path(checkpoint).exists():
        progress = _resume(state, checkpoint, bound_to)
    kept_at = progress.seconds
    cpu_began = time.process_time() - progress.cpu_seconds
    clock = _Clock(progress)
    batches = _batches(windows, settings, progress.step)
    while progress.done < 1:
        batch = next(batches)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        state.step(settings.rate_at(progress.done))
        tokens, seconds = progress.tokens + batch.numel(), clock.tick()
        value = float(loss.detach())
        progress = replace(
            progress,
            step=progress.step + 1,
            tokens=tokens,
            seconds=seconds,
            cpu_seconds=time.process_time() - cpu_began,
            done=settings.done(tokens, seconds),
            loss=value if progress.step == 0 else progress.loss + 0.04 * (value - progress.loss),
        )
        if checkpoint is not None and (progress.done == 1 or seconds - kept_at >= 60 * settings.keep_minutes):
            _keep(state, progress, checkpoint, bound_to)
            kept_at = seconds
        if on_step is not None:
            on_step(progress)
    return progress


class _Clock:
    """Seconds of work, step by step: a step that took far longer than those before it was a stopped process."""

    def __init__(self, progress: Progress):
        self.seconds = progress.seconds
        self.steps = progress.step
        self.last = time.perf_counter()

    def tick(self) -> float:
        """End a step; returns the seconds so far."""
        now = time.perf_counter()
        took, self.last = now - self.last, now
        if self.steps >= _USUAL:
            took = min(took, _STOPPED * self.seconds / self.steps)
        self.seconds += took
        self.steps += 1
        return self.seconds


def _batches(windows: Tensor, settings: TrainSettings, step: int) -> Iterator[Tensor]:
    """Batches from step ``step`` on: every window once, in an order of its own each time round."""
    count = windows.shape[0]
    place = step * settings.batch
    order: dict[int, Tensor] = {}
    while True:
        rows = []
        for number in range(place, place + settings.batch):
            turn = number // count
            if turn not in order:
                generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + turn)
                order = {turn: torch.randperm(count, generator=generator)}
            rows.append(windows[order[turn][number % count]])
        place += settings.batch
        yield torch.stack(rows)


def _keep(state: Adam, progress: Progress, path: StrPath, bound_to: str) -> None:
    write_container(path, KIND, state.tensors(), {"progress": json.dumps(progress.to_json()), "bound_to": bound_to})


def _resume(state: Adam, path: StrPath, bound_to: str) -> Progress:
    found = read_container(path, kind=KIND)
    if found.metadata.get("bound_to") != bound_to:
        raise CorruptPacket(f"{path} is a checkpoint of another training: remove it, or start elsewhere")
    try:
        progress = Progress(**parse_json(found.metadata.get("progress", "null"), "the checkpoint's progress"))
    except TypeError as error:
        raise CorruptPacket(f"{path} is no checkpoint that fits together: {error}") from error
    state.load(found.tensors, progress.step)
    return replace(progress, resumed=progress.tokens)
