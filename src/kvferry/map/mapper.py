"""The mapper: one model's snapshot in, another's out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.map.blocks import Block, block_rows, blocks_of, by_rotation, heads_of, holds, turn
from kvferry.map.pair import require_pair
from kvferry.map.part import TILE, Part, parameters, run_part
from kvferry.snapshot import Identity, LayerState, Snapshot
from kvferry.snapshot.awaits import without_awaits
from kvferry.snapshot.rope import Rotary
from kvferry.version import __version__

VARIANTS = ("ridge", "head_local", "ridge+residual", "mlp", "ridge+e2e", "residual+e2e")
"""Kinds of map, by the names of the papers."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a mapper was made, as far as its use depends on it.

    Attributes:
        variant: one of `VARIANTS`.
        top_k: source layers a target layer; ``None``: all that there are.
        ridge: λ.
        sources: ``same`` (keys from keys, values from values) or ``both`` (each from keys and values).
        strip: whether keys were mapped without the source's rotary positions.
        reapply: whether they then get the target's.
        native_prefix: first tokens that the target had better prefill itself; the map was fitted without them.
    """

    variant: str = "ridge"
    top_k: int | None = 4
    ridge: float = 0.01
    sources: str = "same"
    strip: bool = True
    reapply: bool = True
    native_prefix: int = 4


@dataclass(frozen=True, slots=True, eq=False)
class Mapper:
    """Maps caches of one model to another's; from `kvferry.fit` or `from_pretrained`.

    Attributes:
        source, target: identities of the two models. A cache is taken only from the very source that the mapper was
            fitted on, by its weights, dtype, tokenizer and layout.
        parts: maps, which cover every kv head of the target once.
        source_rotaries, target_rotaries: of each layer.
        recipe: see `Recipe`.
        made: what it was fitted on: tokens, sequences, digest of the text, seconds.
        measures: held out: ``r2`` by target layer for keys and values, ``r2_single`` by target layer and source.
        digest: names the mapper: SHA-256 over all of the above.
    """

    source: Identity
    target: Identity
    parts: tuple[Part, ...]
    source_rotaries: tuple[Rotary, ...]
    target_rotaries: tuple[Rotary, ...]
    recipe: Recipe = field(default_factory=Recipe)
    made: Mapping[str, Any] = field(default_factory=dict)
    measures: Mapping[str, Any] = field(default_factory=dict)
    digest: str = field(init=False)
    _ready: dict[tuple[torch.dtype, torch.device], tuple[Part, ...]] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        from kvferry.map.artifact import mapper_digest

        self._check()
        object.__setattr__(self, "digest", mapper_digest(self))

    @property
    def parameters(self) -> int:
        """Weights and biases in all."""
        return parameters(self.parts)

    def map(self, snapshot: Snapshot) -> Snapshot:
        """The target's cache of the same tokens, made of the source's.

        The first tokens of a context carry massive values that no linear map meets: let the target prefill them
        itself, see `kvferry.evaluate.map_run.transfer`.

        Raises:
            IncompatibleIdentity: the cache is of another model than the mapper's source.
            InvalidInput: a layer no longer holds the tokens that the target needs.
        """
        self._require_source(snapshot)
        layers = self._mapped(snapshot, 0)
        stages = _before_awaits(snapshot.identity.construction, self._stage)
        return Snapshot(self._identity(stages), snapshot.token_ids, snapshot.positions, snapshot.mask, layers)

    def extend(self, snapshot: Snapshot, longer: Snapshot) -> Snapshot:
        """``snapshot`` of the target with the further tokens of ``longer``, a cache of the source: only those are
        mapped, to the same bits as if all were mapped at once.

        Args:
            snapshot: of the target: mapped, prefilled, decoded, or some of each. Its tokens stay as they are.
            longer: of the source, over the same tokens and more.

        Raises:
            IncompatibleIdentity: of other models, or ``snapshot`` is not of the first tokens of ``longer``.
            InvalidInput: a layer no longer holds the tokens that are needed.
        """
        snapshot.identity.require_compatible(self.target, "this cache is not of the mapper's target")
        self._require_source(longer)
        snapshot.require_prefix_of(longer.token_ids)
        start = snapshot.seq_len
        for name in ("positions", "mask"):
            have, want = getattr(snapshot, name).cpu(), getattr(longer, name)[:, :start].cpu()
            if not torch.equal(have, want):
                raise IncompatibleIdentity(f"the two caches have other {name}", {name: (have.tolist(), want.tolist())})
        if longer.seq_len == start:
            return snapshot
        layers = []
        for old, new in zip(snapshot.layers, self._mapped(longer, start), strict=True):
            assert old.keys is not None
            assert old.values is not None
            assert new.keys is not None
            assert new.values is not None
            held = old.kind.held(longer.seq_len)
            keys, values = (
                torch.cat([a.to(b.device), b], dim=2)[:, :, -held:]
                for a, b in ((old.keys, new.keys), (old.values, new.values))
            )
            layers.append(LayerState(old.kind, keys, values, longer.seq_len))
        before = without_awaits(snapshot.identity.construction)
        stages = before if before and before[-1] == self._stage else (*before, self._stage)
        stages += tuple(stage for stage in longer.identity.construction if stage.startswith("awaits("))
        return Snapshot(self._identity(stages), longer.token_ids, longer.positions, longer.mask, tuple(layers))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``mapper.safetensors``, ``config.json`` and a model card to a folder, which is made.

        Raises:
            InvalidInput: the folder cannot be written.
        """
        from kvferry.map.artifact import save

        save(self, folder)

    @staticmethod
    def from_pretrained(folder_or_hub: str | os.PathLike[str], *, max_bytes: int | None = None) -> Mapper:
        """Read what `save_pretrained` wrote, from a folder or a hub repository; every byte is checked first.

        Raises:
            CorruptPacket: no mapper, a damaged one, or one whose parts do not fit together.
            UnsupportedVersion: of a newer version.
            TooLarge: more bytes than ``max_bytes``.
            InvalidInput, ModelUnavailable: there is no such folder or repository.
        """
        from kvferry.map.artifact import load

        return load(folder_or_hub, max_bytes=max_bytes)

    @property
    def _stage(self) -> str:
        return f"mapped({self.source.model}, {self.digest[:16]})"

    def _identity(self, stages: tuple[str, ...]) -> Identity:
        return replace(self.target, construction=stages, kvferry=__version__)

    def _require_source(self, snapshot: Snapshot) -> None:
        snapshot.identity.require_compatible(self.source, "this cache is not of the mapper's source")

    def _check(self) -> None:
        """Raise unless the two models are a pair and the parts cover the target once, from what the source holds."""
        require_pair(self.source, self.target)
        for rotaries, identity in ((self.source_rotaries, self.source), (self.target_rotaries, self.target)):
            if len(rotaries) != len(identity.layers):
                raise InvalidInput(
                    f"{len(rotaries)} rotations for the {len(identity.layers)} layers of {identity.model}"
                )
        covered: dict[Block, list[int]] = {block: [] for block in blocks_of(self.target)}
        for part in self.parts:
            if part.target not in covered:
                raise InvalidInput(f"the target has no {part.target.side} in layer {part.target.layer}")
            _check_part(part, self.source, self.target)
            covered[part.target] += range(part.first_head, part.first_head + part.heads)
        for block, heads in covered.items():
            if sorted(heads) != list(range(block.heads(self.target))):
                raise InvalidInput(f"{block.side} of layer {block.layer}: heads {heads} are mapped, not each once")

    def _parts(self, dtype: torch.dtype, device: torch.device) -> tuple[Part, ...]:
        """The parts with weights to compute with; made once."""
        key = (dtype, device)
        if key not in self._ready:
            self._ready.clear()
            self._ready[key] = tuple(part.to(dtype, device) for part in self.parts)
        return self._ready[key]

    @torch.no_grad()
    def _mapped(self, snapshot: Snapshot, start: int) -> tuple[LayerState, ...]:
        """Layers of the target with the tokens from ``start`` on, or as many of them as their kind keeps."""
        length = snapshot.seq_len
        kinds = [layer.kind for layer in self.target.layers]
        firsts = [max(start, length - kind.held(length)) for kind in kinds]
        origin = min(firsts) // TILE * TILE
        used = list(dict.fromkeys(block for part in self.parts for block in part.sources))
        dtype = _compute_dtype(self.target)
        rows = self._source_rows(snapshot, used, origin, dtype)
        device = rows[used[0]].device
        outputs: dict[Block, list[tuple[int, Tensor]]] = {block: [] for block in blocks_of(self.target)}
        for part in self._parts(dtype, device):
            first = firsts[part.target.layer]
            begin = first // TILE * TILE
            made = run_part(part, {block: rows[block][:, begin - origin :] for block in part.sources}, begin)
            outputs[part.target].append((part.first_head, heads_of(made[:, first - begin :], part.heads)))
        tensors = {
            block: found[0][1]
            if len(found) == 1
            else torch.cat([tensor for _, tensor in sorted(found, key=_head)], dim=1)
            for block, found in outputs.items()
        }
        return self._turned(snapshot, tensors, firsts)

    def _source_rows(
        self, snapshot: Snapshot, blocks: Sequence[Block], origin: int, dtype: torch.dtype
    ) -> dict[Block, Tensor]:
        """Rows of the source from token ``origin`` on; zeros at masked tokens and where a layer holds none."""
        rows: dict[Block, Tensor] = {}
        starts = {block: max(origin, snapshot.layers[block.layer].first) for block in blocks}
        for first in sorted(set(starts.values())):
            group = [block for block in blocks if starts[block] == first]
            tokens = torch.arange(first, snapshot.seq_len)
            rotaries = self.source_rotaries if self.recipe.strip else None
            mask = snapshot.mask[:, first:]
            for block, own in block_rows(snapshot, rotaries, group, tokens, dtype).items():
                kept = own if bool(mask.all()) else torch.where(mask.to(own.device).unsqueeze(-1), own, 0)
                rows[block] = torch.nn.functional.pad(kept, (0, 0, first - origin, 0)) if first > origin else kept
        return rows

    def _turned(
        self, snapshot: Snapshot, tensors: Mapping[Block, Tensor], firsts: Sequence[int]
    ) -> tuple[LayerState, ...]:
        """Layers of the target, its rotary positions put on its keys."""
        dtype = snapshot_dtype(self.target)
        keys = {block.layer: tensor for block, tensor in tensors.items() if block.side == "keys"}
        if self.recipe.reapply:
            for first in sorted(set(firsts)):
                mine = [Block(layer, "keys") for layer in keys if firsts[layer] == first]
                positions = snapshot.positions[:, first:]
                for group in by_rotation(mine, self.target_rotaries):
                    parts = [keys[block.layer] for block in group]
                    places = positions.to(parts[0].device)
                    turned = turn(self.target_rotaries[group[0].layer].apply, parts, places, dtype, as_rows=False)
                    for block, part in zip(group, turned, strict=True):
                        keys[block.layer] = part
        layers = []
        for index, geometry in enumerate(self.target.layers):
            own = keys[index].to(dtype).contiguous(), tensors[Block(index, "values")].to(dtype).contiguous()
            if dtype == torch.float16 and not all(bool(part.isfinite().all()) for part in own):
                raise InvalidInput(f"layer {index}: mapped numbers are beyond float16; fit for a target in bfloat16")
            layers.append(LayerState(geometry.kind, *own, snapshot.seq_len))
        return tuple(layers)


def snapshot_dtype(identity: Identity) -> torch.dtype:
    """Dtype of a model's caches."""
    from kvferry.snapshot import dtype_from_name

    return dtype_from_name(identity.dtype)


def _compute_dtype(target: Identity) -> torch.dtype:
    """The target's own, in which its keys and values are rounded anyway; float16 would overflow on massive values."""
    dtype = snapshot_dtype(target)
    return dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32


def _before_awaits(construction: tuple[str, ...], stage: str) -> tuple[str, ...]:
    plain = without_awaits(construction)
    return (*plain, stage, *(item for item in construction if item.startswith("awaits(")))


def _head(found: tuple[int, Tensor]) -> int:
    return found[0]


def _check_part(part: Part, source: Identity, target: Identity) -> None:
    where = f"{part.target.side} of layer {part.target.layer}, head {part.first_head}"
    inputs = sum(block.width(source) for block in part.sources)
    outputs = part.heads * part.target.head_dim(target)
    if not part.sources or part.heads < 1 or len(set(part.sources)) != len(part.sources):
        raise InvalidInput(f"{where}: no sources, no heads, or a source twice")
    if part.first_head < 0 or part.first_head + part.heads > part.target.heads(target):
        raise InvalidInput(f"{where}: the target has {part.target.heads(target)} heads")
    for block in part.sources:
        if not holds(source.layers[block.layer], target.layers[part.target.layer]):
            raise InvalidInput(f"{where}: layer {block.layer} of the source does not keep all tokens that it needs")
    chains = [[part.affine]] if part.affine is not None else []
    chains += [list(part.hidden)] if part.hidden else []
    if not chains:
        raise InvalidInput(f"{where}: it has no weights")
    for chain in chains:
        width = inputs
        for layer in chain:
            weight, bias = layer
            if weight.dim() != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
                raise InvalidInput(f"{where}: weights {tuple(weight.shape)} do not take {width} numbers")
            width = int(weight.shape[1])
        if width != outputs:
            raise InvalidInput(f"{where}: {width} numbers come out, not {outputs}")
