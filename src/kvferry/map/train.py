"""What is trained on top of a linear map or in its place: a small residual, trained on what attention makes of it; a
perceptron; a linear correction, trained through the target itself.

Nothing but one pair of caches is held at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvferry.errors import InvalidInput
from kvferry.map.blocks import Block, block_rows, first_held, heads_of
from kvferry.map.calibration import Calibration
from kvferry.map.mapper import Mapper
from kvferry.map.moments import Moments
from kvferry.map.part import Layer, Part
from kvferry.snapshot import LayerState, Snapshot


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a trained part is trained.

    Attributes:
        hidden: widths of its layers; none: it is affine.
        rate: Adam's at its highest, reached by a straight line and left by another down to nothing.
        epochs: times that the text is gone through, at most.
        on_rows: weight of the error of keys and values themselves, as shares of their variance.
        on_attention: weight of the error of attention outputs, as shares of theirs.
        on_target: weight of the KL of the target's predictions after a mapped prefix from those after its own.
        on_states: weight of the error of the target's states there, layer by layer, as shares of their squares.
        queries: last queries of a sequence that attention outputs are of.
        affine: whether ridge stays below.
        linear: without nonlinearities: what is learnt becomes a part of ridge's own weights, and costs nothing at use.
        stride: every so many-th token's rows count, where attention outputs do not.
        sequences: of those to fit on, at most; ``None``: all.
        held: of those held out, at most, that errors are measured on.
        window: tokens that a sequence is cut into, where the target's predictions count.
        looks: measurements an epoch; the best one's weights are kept.
        patience: measurements without a better one after which it ends.
        warmup: share of the steps that the rate takes to its highest.
    """

    hidden: tuple[int, ...] = ()
    rate: float = 1e-3
    epochs: int = 2
    on_rows: float = 1.0
    on_attention: float = 0.0
    on_target: float = 0.0
    on_states: float = 0.0
    queries: int = 64
    affine: bool = True
    linear: bool = False
    stride: int = 1
    sequences: int | None = None
    held: int = 12
    window: int = 512
    looks: int = 1
    patience: int = 3
    warmup: float = 0.04

    def __post_init__(self) -> None:
        if min(self.epochs, self.stride, self.held, self.looks, self.patience) < 1 or self.window < 16:
            raise InvalidInput("epochs, stride, held, looks and patience are 1 or more, window is 16 or more")
        if self.sequences is not None and self.sequences < 1:
            raise InvalidInput(f"{self.sequences} sequences to train on: at least 1")
        if self.linear and not self.affine:
            raise InvalidInput("a linear part without ridge below it is ridge: leave linear out")

    def rate_at(self, step: int, steps: int) -> float:
        """Learning rate of a step, counted from 0."""
        up = max(1, round(self.warmup * steps))
        return self.rate * min((step + 1) / up, (steps - step) / max(1, steps - up))


_THROUGH_TARGET = TrainSettings(rate=3e-4, on_rows=0.0, on_target=1.0, on_states=0.5, linear=True, looks=2, held=8)

VARIANTS = {
    "ridge+residual": TrainSettings(hidden=(64,), epochs=2, on_rows=0.1, on_attention=1.0),
    "mlp": TrainSettings(hidden=(1024, 1024), epochs=20, affine=False, stride=4),
    "ridge+e2e": _THROUGH_TARGET,
    "residual+e2e": replace(_THROUGH_TARGET, hidden=(128,), linear=False),
}
"""Trained variants; ``mlp`` as in the paper (arXiv 2608.03893): two layers of 1,024, Adam at 1e-3, 20 epochs, every
fourth token."""


class Trainer:
    """Trains the hidden parts of a mapper, one pair of caches after another.

    Args:
        mapper: of variant ``ridge``, whose sources are kept.
        calibration: that it was fitted from: scales of what goes in and comes out.
        settings: see `TrainSettings`.
        seed: of the first weights.
    """

    def __init__(self, mapper: Mapper, calibration: Calibration, settings: TrainSettings, seed: int = 0):
        self.mapper, self.settings = mapper, settings
        generator = torch.Generator().manual_seed(seed)
        self._learners = [_Learner(part, calibration, settings, generator) for part in mapper.parts]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """What is learnt, by name."""
        return {
            f"{place}.{number}": weight
            for place, learner in enumerate(self._learners)
            for number, weight in enumerate(learner.weights)
        }

    def step(self, source: Snapshot, target: Snapshot, *, learn: bool = True, offset: int = 0) -> dict[str, float]:
        """Add the gradients of one sequence's caches to those at the weights; returns mean errors, ``rows`` and
        ``attention``.

        Args:
            source, target: of the same tokens; the target's with its queries where attention counts.
            learn: without, only the errors are measured.
            offset: shifts which tokens a stride takes.

        Raises:
            InvalidInput: a batch, or a cache without queries.
        """
        if source.batch_size != 1 or target.batch_size != 1:
            raise InvalidInput("a map is trained on one sequence at a time")
        made, tokens = self._rows(source, offset)
        errors: dict[str, list[float]] = {"rows": [], "attention": []}
        with torch.set_grad_enabled(learn):
            for index, own in self._layers().items():
                loss = self._loss(index, own, made, tokens, target, errors)
                if learn and loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
        return {name: sum(values) / len(values) for name, values in errors.items() if values}

    def made(self, source: Snapshot) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """The first token that is mapped, and keys and values of each layer of the target from there on, in float32,
        the target's rotary positions on them: what the target's gradients can come back through.

        Raises:
            InvalidInput: a batch, or a target with layers that have no cache of their own.
        """
        if source.batch_size != 1:
            raise InvalidInput("a map is trained on one sequence at a time")
        rows, tokens = self._rows(source, 0, stride=1)
        rotaries = self.mapper.target_rotaries if self.mapper.recipe.reapply else None
        layers = self._layers()
        found = []
        for index in range(len(self.mapper.target.layers)):
            if index not in layers:
                raise InvalidInput(f"layer {index} of the target has no cache of its own: nothing is mapped to it")
            sides: dict[str, list[tuple[int, Tensor]]] = {"keys": [], "values": []}
            for learner in layers[index]:
                part = learner.part
                y = learner(torch.cat([rows[block][0] for block in part.sources], dim=-1))
                sides[part.target.side].append((part.first_head, heads_of(y[None], part.heads)))
            keys, values = (_joined(own) for own in sides.values())
            if rotaries is not None:
                keys = rotaries[index].apply(keys, source.positions[:, tokens])
            found.append((keys, values))
        return int(tokens[0]), found

    def _layers(self) -> dict[int, list[_Learner]]:
        layers: dict[int, list[_Learner]] = {}
        for learner in self._learners:
            layers.setdefault(learner.part.target.layer, []).append(learner)
        return layers

    def _rows(self, source: Snapshot, offset: int, stride: int | None = None) -> tuple[dict[Block, Tensor], Tensor]:
        """Rows of all sources, and which tokens they are of."""
        step = stride or (1 if self.settings.on_attention else self.settings.stride)
        used = list(dict.fromkeys(block for learner in self._learners for block in learner.part.sources))
        first = max(self.mapper.recipe.native_prefix, first_held(source, used)) + offset % step
        tokens = torch.arange(first, source.seq_len, step)
        rotaries = self.mapper.source_rotaries if self.mapper.recipe.strip else None
        return block_rows(source, rotaries, used, tokens), tokens

    def forget(self) -> None:
        """Begin to sum for `r2` anew."""
        for learner in self._learners:
            learner.missed, learner.whole = torch.zeros(2, learner.part.heads, dtype=torch.float64)

    def r2(self) -> dict[str, list[float]]:
        """R² by target layer of keys and values, mean over heads, of what `step` has seen since `forget`."""
        found: dict[str, list[float]] = {}
        for side in ("keys", "values"):
            layers: dict[int, list[_Learner]] = {}
            for learner in self._learners:
                if learner.part.target.side == side:
                    layers.setdefault(learner.part.target.layer, []).append(learner)
            found[side] = [
                float(torch.cat([1 - one.missed / one.whole.clamp_min(1e-30) for one in own]).mean())
                for _, own in sorted(layers.items())
            ]
        return found

    def finish(self, made: Mapping[str, Any], r2: Mapping[str, Sequence[float]]) -> Mapper:
        """The mapper with what was learnt: ``made`` is added to its record, ``r2`` is its own, not the linear map's."""
        parts = tuple(learner.finished() for learner in self._learners)
        measures = {**self.mapper.measures, "r2": {side: list(values) for side, values in r2.items()}}
        return replace(self.mapper, parts=parts, made={**self.mapper.made, **made}, measures=measures)

    def _loss(
        self,
        index: int,
        own: list[_Learner],
        made: Mapping[Block, Tensor],
        tokens: Tensor,
        target: Snapshot,
        errors: dict[str, list[float]],
    ) -> Tensor:
        """Of one layer of the target."""
        layer = target.layers[index]
        held = tokens >= layer.first
        start = int(tokens[held][0])
        loss = torch.zeros(())
        mapped: dict[str, list[tuple[int, Tensor]]] = {"keys": [], "values": []}
        rotaries = self.mapper.target_rotaries if self.mapper.recipe.reapply else None
        for learner in own:
            part = learner.part
            x = torch.cat([made[block][0, held] for block in part.sources], dim=-1)
            y = learner(x)
            want = block_rows(target, rotaries, [part.target], tokens[held])[part.target][0]
            size = want.shape[1] // part.target.heads(self.mapper.target)
            want = want[:, part.first_head * size : (part.first_head + part.heads) * size]
            missed = ((y - want) / learner.spread).square().mean()
            errors["rows"].append(float(missed.detach()))
            with torch.no_grad():
                for sums, off in ((learner.missed, y - want), (learner.whole, want - learner.centre)):
                    squares = off.double().square().reshape(len(off), part.heads, size)
                    sums.add_(squares.sum(dim=(0, 2)))
            loss = loss + self.settings.on_rows * missed
            mapped[part.target.side].append((part.first_head, heads_of(y[None], part.heads)))
        if self.settings.on_attention and layer.first == 0:
            keys, values = (_joined(found) for found in mapped.values())
            if rotaries is not None:
                keys = rotaries[index].apply(keys, target.positions[:, start:])
            missed = _attention_error(index, layer, keys, values, start)
            errors["attention"].append(float(missed.detach()))
            loss = loss + self.settings.on_attention * missed
        return loss


def _joined(found: list[tuple[int, Tensor]]) -> Float[Tensor, "batch heads tokens dim"]:
    """Heads of several parts, in order."""
    return torch.cat([tensor for _, tensor in sorted(found, key=lambda item: item[0])], dim=1)


def _attention_error(index: int, layer: LayerState, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Squared error of attention outputs with mapped keys and values from token ``start`` on, over their variance."""
    if layer.queries is None or layer.keys is None or layer.values is None:
        raise InvalidInput(f"layer {index} has no queries: capture with query_window=64 or so")
    native = layer.keys.float(), layer.values.float()
    mixed = (
        torch.cat([native[0][:, :, :start], keys], dim=2),
        torch.cat([native[1][:, :, :start], values], dim=2),
    )
    want, found = (_attend(layer, *pair) for pair in (native, mixed))
    variance = (want - want.mean(dim=-2, keepdim=True)).square().mean(dim=(-2, -1), keepdim=True)
    return ((found - want).square() / variance.clamp_min(1e-12)).mean()


def _attend(layer: LayerState, keys: Tensor, values: Tensor) -> Float[Tensor, "batch kv_heads group window dim"]:
    assert layer.queries is not None
    batch, heads, held, dim = keys.shape
    window = min(layer.queries.shape[2], held)
    queries = layer.queries[:, :, -window:].reshape(batch, heads, -1, window, dim).float()
    scores = torch.einsum("bhgwd,bhnd->bhgwn", queries, keys)
    tokens, asking = torch.arange(held), torch.arange(held - window, held).unsqueeze(1)
    allowed = tokens <= asking
    if layer.kind.name == "sliding" and layer.kind.argument is not None:
        allowed &= tokens > asking - layer.kind.argument
    paid = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
    return torch.einsum("bhgwn,bhnd->bhgwd", paid, values)


class _Learner:
    """The hidden part of one part: of standardised inputs, for standardised outputs."""

    def __init__(self, part: Part, calibration: Calibration, settings: TrainSettings, generator: torch.Generator):
        self.part = part
        self._mean, self._deviation, level, spread = _scales(part, calibration)
        self._level, self.spread = (torch.zeros_like(level) if settings.affine else level), spread
        self.centre = level
        self.missed, self.whole = torch.zeros(2, part.heads, dtype=torch.float64)
        self._affine = part.affine if settings.affine else None
        sizes = [len(self._mean), *settings.hidden, len(self.spread)]
        self._linear = settings.linear
        self._weights: list[tuple[nn.Parameter, nn.Parameter]] = []
        for place, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
            if settings.affine and place == len(sizes) - 2:
                weight.zero_()  # it begins as ridge alone
            self._weights.append((nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))))

    @property
    def weights(self) -> list[nn.Parameter]:
        return [tensor for pair in self._weights for tensor in pair]

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        hidden = (x - self._mean) / self._deviation
        for place, (weight, bias) in enumerate(self._weights):
            if place and not self._linear:
                hidden = nn.functional.gelu(hidden, approximate="tanh")
            hidden = torch.addmm(bias, hidden, weight)
        y = self._level + hidden * self.spread
        return y if self._affine is None else y + x @ self._affine[0] + self._affine[1]

    def finished(self) -> Part:
        """The same as a part, scales within its weights."""
        layers: list[Layer] = [(weight.detach(), bias.detach()) for weight, bias in self._weights]
        weight, bias = layers[0]
        layers[0] = weight / self._deviation[:, None], bias - (self._mean / self._deviation) @ weight
        weight, bias = layers[-1]
        layers[-1] = weight * self.spread, bias * self.spread + self._level
        if self._linear:
            assert self._affine is not None
            weight, bias = layers[0]
            for factor, shift in layers[1:]:
                weight, bias = weight @ factor, bias @ factor + shift
            whole = (self._affine[0] + weight).contiguous(), (self._affine[1] + bias).contiguous()
            return replace(self.part, affine=whole)
        return replace(
            self.part,
            affine=self._affine,
            hidden=tuple((weight.contiguous(), bias.contiguous()) for weight, bias in layers),
        )


def _scales(part: Part, calibration: Calibration) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and deviation of a part's inputs and of its outputs, float32."""
    place = next(index for index, layout in enumerate(calibration.layouts) if part.target in layout.targets)
    moments = calibration.moments["fit"][place]
    layout = moments.layout
    starts, ends = layout.source_starts, layout.target_starts
    columns = torch.cat(
        [
            torch.arange(starts[index], starts[index + 1])
            for index in (layout.sources.index(block) for block in part.sources)
        ]
    )
    target = layout.targets.index(part.target)
    size = layout.target_widths[target] // layout.target_heads[target]
    begin = ends[target] + part.first_head * size
    rows = slice(begin, begin + part.heads * size)
    x = moments.mean_x()[columns], _deviation(_squares(moments)[columns], moments.sum_x[columns], moments.count)
    y = moments.mean_y()[rows], _deviation(moments.energy[rows], moments.sum_y[rows], moments.count)
    return x[0].float(), x[1].float(), y[0].float(), y[1].float()


def _squares(moments: Moments) -> Tensor:
    return torch.cat([gram[:, : len(gram)].diagonal() for gram in moments.gram])


def _deviation(squares: Tensor, sums: Tensor, count: int) -> Tensor:
    variance = (squares / count - (sums / count).square()).clamp_min(0)
    return variance.sqrt().clamp_min(1e-6)
