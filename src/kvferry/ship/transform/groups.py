"""Which layers are transformed together."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.snapshot import Identity


@dataclass(frozen=True, slots=True)
class Group:
    """Keys or values of some layers, side by side: one vector a token.

    Attributes:
        keys: keys, else values.
        layers: which, ascending; all hold the same tokens.
        sizes: channels (heads x head_dim) of each.
    """

    keys: bool
    layers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Channels of all layers."""
        return sum(self.sizes)


def layer_groups(identity: Identity, width: int) -> tuple[Group, ...]:
    """Runs of layers of one kind, cut evenly so that no group is wider than ``width`` where it has several layers.

    Layers between two of a run that are of another kind do not end it: a model's global layers, spread among its
    sliding ones, are a run of their own.
    """
    groups: list[Group] = []
    for keys in (True, False):
        kinds: dict[str, list[int]] = {}
        for index, layer in enumerate(identity.layers):
            if layer.kind.name != "shared":
                kinds.setdefault(str(layer.kind), []).append(index)
        for run in kinds.values():
            sizes = [_size(identity, index, keys=keys) for index in run]
            parts = max(1, -(-sum(sizes) // width))
            each = -(-len(run) // parts)
            for start in range(0, len(run), each):
                stop = start + each
                groups.append(Group(keys, tuple(run[start:stop]), tuple(sizes[start:stop])))
    return tuple(groups)


def _size(identity: Identity, index: int, *, keys: bool) -> int:
    layer = identity.layers[index]
    return layer.kv_heads * (layer.head_dim if keys else layer.value_head_dim)
