"""How much a model's predictions feel an error in its cache: by layer, keys and values apart, and by token.

To second order the KL divergence that an error e of the cache causes is ``e' F e / 2``, with F the Fisher information
of the next tokens' distribution. Errors of quantisers are as good as uncorrelated, so that its diagonal is what counts:
a number for each channel of each layer, averaged over tokens, times a number for each token. The first is found once a
model (`kvferry.hf.calibrate_layers`); without it, what an error does to a layer's attention output stands in. The
second follows from the attention that the last queries pay: the tokens of a layer are ranked by it, and how the Fisher
information falls along that ranking is much the same in different models and texts (`ATTENTION_PROFILE`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.ship.importance import has_queries, layer_scores
from kvferry.ship.policy.tiers import N_SINK
from kvferry.snapshot import Identity, Snapshot
from kvferry.snapshot.files import write_text
from kvferry.snapshot.folders import cache_folder
from kvferry.snapshot.strict_json import parse_json

log = logging.getLogger(__name__)

FORMAT = 1

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Quantiles of a layer's tokens, least attended first, between which a profile says how much they matter."""

ATTENTION_PROFILE = (0.05, 0.09, 0.1, 0.13, 0.15, 0.19, 0.27, 0.44, 0.95, 2.6, 5.2, 10.0, 35.0)
"""Mean Fisher information of a token between `EDGES` of attention, of SmolLM2-135M and Gemma-3-270M, mean 1."""

POSITION_PROFILE = (0.7, 0.5, 0.4, 0.5, 0.45, 0.6, 0.6, 1.0, 1.2, 2.5, 3.0, 5.0, 10.0)
"""The same where tokens are ranked by their position."""

KEY_TEMPER, VALUE_TEMPER = 0.5, 0.8
"""Powers of the profiles that are used as weights: coarsely written tokens, of keys above all, err beyond what
is linear in them, and the ranking of the last queries is not that of the next ones. Chosen on the last 40% of
WikiText-2's test text, at a budget of 0.2."""


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """What an error costs.

    Attributes:
        keys, values: of each layer, mean Fisher information a token of each channel ``(kv_heads, head_dim)``;
            ``None`` for a layer without tensors of its own.
        key_energy, value_energy: of each layer, that times the channels' variance over tokens, summed: what is to be
            expected of a cache that is not there yet.
        key_profile, value_profile: weights between `EDGES`, mean 1.
    """

    keys: tuple[Float[Tensor, "kv_heads head_dim"] | None, ...]
    values: tuple[Float[Tensor, "kv_heads value_head_dim"] | None, ...]
    key_energy: tuple[float, ...]
    value_energy: tuple[float, ...]
    key_profile: tuple[float, ...] = ATTENTION_PROFILE
    value_profile: tuple[float, ...] = ATTENTION_PROFILE

    def fits(self, identity: Identity) -> bool:
        """Whether it is of a model of this shape."""
        shapes = [
            (None, None)
            if layer.kind.name == "shared"
            else ((layer.kv_heads, layer.head_dim), (layer.kv_heads, layer.value_head_dim))
            for layer in identity.layers
        ]
        own = [
            tuple(None if side is None else tuple(side.shape) for side in pair)
            for pair in zip(self.keys, self.values, strict=True)
        ]
        return shapes == own

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers rounded to five digits."""
        return {
            "format": FORMAT,
            **{name: [_plain(side) for side in getattr(self, name)] for name in ("keys", "values")},
            **{name: _rounded(getattr(self, name)) for name in _NUMBERS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sensitivity:
        """Inverse of `to_json`; raises `CorruptPacket` for anything else."""
        try:
            if data["format"] != FORMAT:
                raise CorruptPacket(f"sensitivities of format {data['format']}, not {FORMAT}")
            sides = {
                name: tuple(None if side is None else torch.tensor(side, dtype=torch.float32) for side in data[name])
                for name in ("keys", "values")
            }
            numbers = {name: tuple(float(number) for number in data[name]) for name in _NUMBERS}
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptPacket(f"these are no sensitivities: {error}") from error
        every = [number for listed in numbers.values() for number in listed]
        tensors = [side for both in sides.values() for side in both if side is not None]
        sound = all(side.dim() == 2 and bool((side.isfinite() & (side >= 0)).all()) for side in tensors)
        lengths = {len(numbers["key_profile"]), len(numbers["value_profile"])} == {len(EDGES) - 1}
        layers = {len(sides["keys"]), len(sides["values"]), len(numbers["key_energy"]), len(numbers["value_energy"])}
        if not sound or not lengths or len(layers) != 1 or not all(0 <= n < math.inf for n in every):
            raise CorruptPacket("these are no sensitivities: numbers that are none, or too few")
        return cls(**sides, **numbers)  # type: ignore[arg-type]


_PIECE = 1 << 17
"""Elements whose squares are taken at a time: all of the extra memory."""

_NUMBERS = ("key_energy", "value_energy", "key_profile", "value_profile")


def flat(snapshot: Snapshot) -> Sensitivity:
    """A prior for a model that nothing is known of: error of a layer's attention output, as a share of its values.

    With a_j the attention to token j and o the output, errors change the output by ``a_j δv_j`` and by
    ``a_j (v_j - o) (q · δk_j)``: channels of keys count by the mean square of the queries that meet them (1 / head_dim
    where the snapshot has no queries), channels of values all the same.
    """
    sides: dict[str, list[Tensor | None]] = {"keys": [], "values": []}
    energies: dict[str, list[float]] = {"keys": [], "values": []}
    for layer in snapshot.layers:
        if layer.keys is None or layer.values is None:
            for name, listed in sides.items():
                listed.append(None)
                energies[name].append(0.0)
            continue
        heads, dim = layer.keys.shape[1], layer.keys.shape[3]
        asked = torch.full((heads, dim), 1 / dim)
        if layer.queries is not None and layer.queries.numel():
            grouped = layer.queries.float().reshape(layer.queries.shape[0], heads, -1, dim)
            asked = grouped.pow(2).mean(dim=(0, 2)).cpu()
        power = _mean_square(layer.values) * layer.values.shape[3]
        sides["keys"].append(asked.nan_to_num(1 / dim, 1 / dim, 1 / dim))
        sides["values"].append(torch.full((heads, layer.values.shape[3]), 1 / power))
        energies["keys"].append(1.0)
        energies["values"].append(1.0)
    return Sensitivity(tuple(sides["keys"]), tuple(sides["values"]), tuple(energies["keys"]), tuple(energies["values"]))


def tempered(profile: Sequence[float], power: float) -> tuple[float, ...]:
    """A power of a profile, of mean 1 again."""
    steps = torch.tensor(profile, dtype=torch.float32).pow(power)
    return tuple((steps / (steps * torch.tensor(EDGES).diff()).sum()).tolist())


def token_weights(
    scores: Float[Tensor, "batch held"],
    sent: Bool[Tensor, "batch held"],
    profile: Sequence[float],
    sinks: Bool[Tensor, "batch held"],
) -> Float[Tensor, "batch held"]:
    """How much each token of a layer matters, from its rank among the tokens sent (0 for the others).

    Args:
        scores: higher = matters more; of equal ones the later token.
        sent: tokens that count.
        profile: weights between `EDGES`.
        sinks: tokens that are no part of the ranking, and weigh nothing: they go raw.
    """
    weights = torch.zeros(scores.shape)
    steps = torch.tensor(profile, dtype=torch.float32)
    inner = torch.tensor(EDGES[1:-1])
    for row in range(scores.shape[0]):
        ranked = (sent[row] & ~sinks[row]).nonzero().flatten()
        if ranked.numel():
            order = torch.argsort(scores[row, ranked], stable=True)
            quantile = (torch.arange(ranked.numel()) + 0.5) / ranked.numel()
            weights[row, ranked[order]] = steps[torch.bucketize(quantile, inner)]
    return weights


def sensitivities_folder() -> Path:
    """Where sensitivities are kept."""
    return cache_folder() / "sensitivities"


def kept_path(identity: Identity, folder: Path | None = None) -> Path:
    """The file for a model: by its weights, whatever its dtype and attention backend."""
    name = hashlib.sha256(identity.weights.encode()).hexdigest()[:32]
    return (folder or sensitivities_folder()) / f"{name}.json"


def keep(found: Sensitivity, identity: Identity, folder: Path | None = None) -> Path:
    """Write sensitivities where `kept` finds them; raises `InvalidInput` or `OSError` where that cannot be done."""
    path = kept_path(identity, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found.to_json(), separators=(",", ":"), allow_nan=False))
    return path


@lru_cache(maxsize=8)
def _read(path: str, _modified: int, _size: int) -> Sensitivity:
    """A file is read once: every plan asks for it, on the way to the first token."""
    data = parse_json(Path(path).read_text(encoding="utf-8"), "a file of sensitivities")
    return Sensitivity.from_json(data if isinstance(data, dict) else {})


def kept(identity: Identity, folder: Path | None = None) -> Sensitivity | None:
    """Sensitivities of the model with this identity, where they were found before; ``None`` otherwise."""
    path = kept_path(identity, folder)
    try:
        status = path.stat()
        found = _read(str(path), status.st_mtime_ns, status.st_size)
        if not found.fits(identity):
            raise CorruptPacket("they are of another shape than the model")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInput, CorruptPacket) as error:
        log.warning("%s is left out: %s", path, error)
        return None
    return found


class Gathered:
    """Fisher information of the caches of some windows, added up window by window.

    Args:
        n_sink: first tokens, which are like no others, take no part and are always sent raw.
    """

    def __init__(self, n_sink: int = N_SINK):
        self.n_sink = n_sink
        self.windows = 0
        self.channels: dict[tuple[str, int], Tensor] = {}
        self.energies: dict[tuple[str, int], float] = {}
        self.ranked: dict[tuple[str, int], Tensor] = {}
        self.layers = 0

    def add(self, snapshot: Snapshot, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
        """One window: the diagonal of the Fisher information of every layer's keys and values, in their shapes."""
        self.windows, self.layers = self.windows + 1, len(snapshot.layers)
        attention = layer_scores(snapshot, "observation_window") if has_queries(snapshot) else None
        for name, side in (("keys", keys), ("values", values)):
            for index, (layer, fisher) in enumerate(zip(snapshot.layers, side, strict=True)):
                if fisher is None:
                    continue
                start = max(0, self.n_sink - layer.first)
                rest = fisher[:, :, start:].float()
                place = (name, index)
                channels = rest.mean(dim=(0, 2))
                self.channels[place] = self.channels.get(place, torch.zeros(())) + channels
                tensor = layer.keys if name == "keys" else layer.values
                assert tensor is not None
                spread = energy(channels, tensor[:, :, start:])
                self.energies[place] = self.energies.get(place, 0.0) + spread
                if attention is not None and rest.shape[2] >= len(EDGES):
                    scores = attention[index, 0, layer.first + start :]
                    found = _by_rank(rest[0].sum(dim=(0, 2)), scores)
                    self.ranked[place] = self.ranked.get(place, torch.zeros(())) + found

    def sensitivity(self) -> Sensitivity:
        """The mean of all windows; raises `InvalidInput` where there is none."""
        if not self.windows:
            raise InvalidInput("sensitivities need at least one window")
        sides, energies, profiles = {}, {}, {}
        for name in ("keys", "values"):
            places = [(name, index) for index in range(self.layers)]
            sides[name] = tuple(
                self.channels[place] / self.windows if place in self.channels else None for place in places
            )
            energies[name] = tuple(self.energies.get(place, 0.0) / self.windows for place in places)
            ranked = [self.ranked[place] for place in places if place in self.ranked]
            profiles[name] = _profile(torch.stack(ranked)) if ranked else ATTENTION_PROFILE
        return Sensitivity(
            sides["keys"],
            sides["values"],
            energies["keys"],
            energies["values"],
            profiles["keys"],
            profiles["values"],
        )


def _by_rank(fisher: Float[Tensor, " tokens"], scores: Float[Tensor, " tokens"]) -> Float[Tensor, " bins"]:
    """Mean of ``fisher`` between `EDGES` of the scores, as a share of its mean."""
    order = torch.argsort(scores, stable=True)
    quantile = (torch.arange(len(order)) + 0.5) / len(order)
    bins = torch.bucketize(quantile, torch.tensor(EDGES[1:-1]))
    sums = torch.zeros(len(EDGES) - 1).index_add_(0, bins, fisher[order])
    counts = torch.bincount(bins, minlength=len(EDGES) - 1).clamp_min(1)
    mean = fisher.mean()
    return sums / counts / mean if mean > 0 else torch.ones(len(EDGES) - 1)


def _profile(found: Float[Tensor, "layers bins"]) -> tuple[float, ...]:
    """The mean over layers, made to rise along the ranking, and of mean 1."""
    rising = torch.cummax(found.mean(dim=0), dim=0).values.clamp_min(1e-3)
    widths = torch.tensor(EDGES).diff()
    return tuple((rising / (rising * widths).sum()).tolist())


def energy(channels: Float[Tensor, "heads dim"], tensor: Float[Tensor, "batch heads tokens dim"]) -> float:
    """Channel weights times the variance of each channel over tokens, summed."""
    if tensor.shape[2] < 2:
        return 0.0
    return float((channels * tensor.float().var(dim=2).mean(dim=0).cpu()).sum())


def _mean_square(tensor: Float[Tensor, "batch heads tokens dim"]) -> float:
    """Mean square of what is not NaN; 1 where that says nothing."""
    total, count = 0.0, tensor.numel()
    if count:
        step = max(1, _PIECE // tensor.shape[3])
        squares = torch.empty(min(step, tensor.shape[2]), tensor.shape[3], device=tensor.device)
        for piece in (piece for row in tensor for head in row for piece in head.split(step)):
            here = squares[: len(piece)].copy_(piece).square_()
            found = float(here.sum())
            if math.isnan(found):
                count -= int(here.isnan().sum())
                found = float(here.nansum())
            total += found
    mean = total / count if count else 0.0
    return mean if 0 < mean < math.inf else 1.0


def _plain(side: Tensor | None) -> list[list[float]] | None:
    return None if side is None else [_rounded(row) for row in side.tolist()]


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers]
