"""Maps with a hidden part: a small residual on top of ridge, trained on what attention makes of it, or a perceptron.

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
    """How a hidden part is trained.

    Attributes:
        hidden: widths of its layers.
        rate: Adam's.
        epochs: times that the text is gone through.
        on_rows: weight of the error of keys and values themselves, as shares of their variance.
        on_attention: weight of the error of attention outputs, as shares of theirs.
        queries: last queries of a sequence that attention outputs are of.
        affine: whether ridge stays below.
    """

    hidden: tuple[int, ...]
    rate: float = 1e-3
    epochs: int = 2
    on_rows: float = 1.0
    on_attention: float = 0.0
    queries: int = 64
    affine: bool = True


VARIANTS = {
    "ridge+residual": TrainSettings(hidden=(64,), epochs=2, on_rows=0.1, on_attention=1.0),
    "mlp": TrainSettings(hidden=(1024, 1024), epochs=20, affine=False),
}
"""Trained variants; ``mlp`` as in the paper (arXiv 2608.03893): two layers of 1,024, Adam at 1e-3, 20 epochs."""


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
        weights = [weight for learner in self._learners for weight in learner.weights]
        self._optimizer = torch.optim.Adam(weights, lr=settings.rate)

    def step(self, source: Snapshot, target: Snapshot, *, learn: bool = True) -> dict[str, float]:
        """One update on the caches of one sequence; returns mean errors, ``rows`` and ``attention``, before it.

        Args:
            source, target: of the same tokens; the target's with its queries where attention counts.
            learn: without, only the errors are measured.

        Raises:
            InvalidInput: a batch, or a cache without queries.
        """
        if source.batch_size != 1 or target.batch_size != 1:
            raise InvalidInput("a map is trained on one sequence at a time")
        layers: dict[int, list[_Learner]] = {}
        for learner in self._learners:
            layers.setdefault(learner.part.target.layer, []).append(learner)
        used = list(dict.fromkeys(block for learner in self._learners for block in learner.part.sources))
        first = max(self.mapper.recipe.native_prefix, first_held(source, used))
        made = block_rows(
            source, self.mapper.source_rotaries if self.mapper.recipe.strip else None, used, _tokens(source, first)
        )
        errors: dict[str, list[float]] = {"rows": [], "attention": []}
        self._optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(learn):
            for index, own in layers.items():
                loss = self._loss(index, own, made, first, target, errors)
                if learn:
                    loss.backward()  # type: ignore[no-untyped-call]
        if learn:
            self._optimizer.step()
        return {name: sum(values) / len(values) for name, values in errors.items() if values}

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

    def weights(self) -> list[Tensor]:
        """A copy of what has been learnt so far, for `restore`."""
        return [weight.detach().clone() for learner in self._learners for weight in learner.weights]

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Go back to what `weights` gave."""
        own = [weight for learner in self._learners for weight in learner.weights]
        with torch.no_grad():
            for weight, kept in zip(own, weights, strict=True):
                weight.copy_(kept)

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
        first: int,
        target: Snapshot,
        errors: dict[str, list[float]],
    ) -> Tensor:
        """Of one layer of the target."""
        layer = target.layers[index]
        start = max(first, layer.first)
        loss = torch.zeros(())
        mapped: dict[str, list[tuple[int, Tensor]]] = {"keys": [], "values": []}
        rotaries = self.mapper.target_rotaries if self.mapper.recipe.reapply else None
        for learner in own:
            part = learner.part
            x = torch.cat([made[block][0, start - first :] for block in part.sources], dim=-1)
            y = learner(x)
            want = block_rows(target, rotaries, [part.target], _tokens(target, start))[part.target][0]
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
            keys, values = (
                torch.cat([tensor for _, tensor in sorted(found, key=lambda item: item[0])], dim=1)
                for found in mapped.values()
            )
            if rotaries is not None:
                keys = rotaries[index].apply(keys, target.positions[:, start:])
            missed = _attention_error(index, layer, keys, values, start)
            errors["attention"].append(float(missed.detach()))
            loss = loss + self.settings.on_attention * missed
        return loss


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
        self._weights: list[tuple[Tensor, Tensor]] = []
        for place, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
            if settings.affine and place == len(sizes) - 2:
                weight.zero_()  # it begins as ridge alone
            self._weights.append((weight.requires_grad_(), torch.zeros(outputs, requires_grad=True)))

    @property
    def weights(self) -> list[Tensor]:
        return [tensor for pair in self._weights for tensor in pair]

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        hidden = (x - self._mean) / self._deviation
        for place, (weight, bias) in enumerate(self._weights):
            hidden = torch.addmm(bias, nn.functional.gelu(hidden, approximate="tanh") if place else hidden, weight)
        y = self._level + hidden * self.spread
        return y if self._affine is None else y + x @ self._affine[0] + self._affine[1]

    def finished(self) -> Part:
        """The same as a part, scales within its weights."""
        layers: list[Layer] = [(weight.detach(), bias.detach()) for weight, bias in self._weights]
        weight, bias = layers[0]
        layers[0] = weight / self._deviation[:, None], bias - (self._mean / self._deviation) @ weight
        weight, bias = layers[-1]
        layers[-1] = weight * self.spread, bias * self.spread + self._level
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


def _tokens(snapshot: Snapshot, first: int) -> Tensor:
    return torch.arange(first, snapshot.seq_len)
