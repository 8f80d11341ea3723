"""Second moments of two caches, added up as the models run: all that a linear map is fitted on.

No activation outlives the call that brings it. Memory depends on the widths of the two models alone, and moments of
disjoint tokens add up: shards are summed, and a fit goes on from what is on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput
from kvferry.map.layout import Layout
from kvferry.snapshot.container import StrPath, naming, read_container, write_container
from kvferry.snapshot.strict_json import parse_json

KIND = "moments"

ROWS = 2048
"""Rows multiplied at once: their products are summed in float32 and then added in float64."""


@dataclass(slots=True, eq=False)
class Moments:
    """Sums over tokens of ``x - shift_x`` and ``y - shift_y`` (source, target) and of their products, in float64.

    The shift, about the mean of the first rows, keeps the products free of the large means that keys have.

    Attributes:
        layout: what lies where.
        count: tokens.
        shift_x, shift_y: ``(source width,)`` and ``(target width,)``; ``None`` until the first rows come.
        sum_x, sum_y: the same shapes.
        gram: of source i, ``(width of i, widths of i … partners[i])``: half of the symmetric whole, no more of it than
            some target needs.
        cross: of source i, ``(width of i, widths of the targets it serves)``.
        energy: ``(target width,)``, sums of squares.
    """

    layout: Layout
    count: int
    shift_x: Float[Tensor, " source"] | None
    shift_y: Float[Tensor, " target"] | None
    sum_x: Float[Tensor, " source"]
    sum_y: Float[Tensor, " target"]
    gram: list[Tensor]
    cross: list[Tensor]
    energy: Float[Tensor, " target"]

    @classmethod
    def empty(cls, layout: Layout) -> Moments:
        """Of no tokens."""
        x, y = layout.source_starts, layout.target_starts
        widths = layout.source_widths

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            layout=layout,
            count=0,
            shift_x=None,
            shift_y=None,
            sum_x=zeros(x[-1]),
            sum_y=zeros(y[-1]),
            gram=[zeros(width, x[layout.partners[i]] - x[i]) for i, width in enumerate(widths)],
            cross=[zeros(width, y[layout.served[i][1]] - y[layout.served[i][0]]) for i, width in enumerate(widths)],
            energy=zeros(y[-1]),
        )

    def centre(self, shift_x: Float[Tensor, " source"], shift_y: Float[Tensor, " target"]) -> None:
        """Choose the shift before the first rows come: shards with the same shift add up to the last bits."""
        assert self.count == 0
        self.shift_x, self.shift_y = shift_x.float().double(), shift_y.float().double()

    @property
    def nbytes(self) -> int:
        """Bytes of all sums: the same for any number of tokens."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._sums())

    def add(self, x: Float[Tensor, "rows source"], y: Float[Tensor, "rows target"]) -> None:
        """Take in some tokens: float32 rows of both sides, in the order of the layout.

        Raises:
            InvalidInput: rows of another width, or with NaN or infinity.
        """
        layout = self.layout
        wanted = (layout.source_starts[-1], layout.target_starts[-1])
        if x.dim() != 2 or y.dim() != 2 or (x.shape[1], y.shape[1]) != wanted or len(x) != len(y):
            raise InvalidInput(f"rows of {tuple(x.shape)} and {tuple(y.shape)} are not of the widths {wanted}")
        if not len(x):
            return
        if not (bool(x.isfinite().all()) and bool(y.isfinite().all())):
            raise InvalidInput("a cache with NaN or infinite entries: nothing can be fitted on it; try bfloat16")
        if self.shift_x is None or self.shift_y is None:
            self.centre(x.mean(dim=0), y.mean(dim=0))
        assert self.shift_x is not None
        assert self.shift_y is not None
        x, y = x.float() - self.shift_x.float(), y.float() - self.shift_y.float()
        for start in range(0, len(x), ROWS):
            self._add(x[start : start + ROWS], y[start : start + ROWS])

    def _add(self, x: Tensor, y: Tensor) -> None:
        layout = self.layout
        starts, ends = layout.source_starts, layout.target_starts
        self.count += len(x)
        self.sum_x += x.sum(dim=0, dtype=torch.float64)
        self.sum_y += y.sum(dim=0, dtype=torch.float64)
        self.energy += y.square().sum(dim=0, dtype=torch.float64)
        for index in range(len(layout.sources)):
            own = x[:, starts[index] : starts[index + 1]].T
            self.gram[index] += own @ x[:, starts[index] : starts[layout.partners[index]]]
            first, end = layout.served[index]
            self.cross[index] += own @ y[:, ends[first] : ends[end]]

    def merge(self, other: Moments) -> None:
        """Add the moments of other tokens.

        Raises:
            IncompatibleIdentity: they are of another layout.
        """
        if other.layout != self.layout:
            raise IncompatibleIdentity(
                "these moments are of another fit", {"layout": (other.layout.digest, self.layout.digest)}
            )
        if other.shift_x is None or other.shift_y is None:
            return
        if self.shift_x is None or self.shift_y is None:
            self.shift_x, self.shift_y = other.shift_x.clone(), other.shift_y.clone()
        moved = other.about(self.shift_x, self.shift_y)
        self.count += moved.count
        for (_, mine), (_, theirs) in zip(self._sums(), moved._sums(), strict=True):
            mine.add_(theirs)

    def about(self, shift_x: Float[Tensor, " source"], shift_y: Float[Tensor, " target"]) -> Moments:
        """The same tokens, with another shift."""
        if self.shift_x is None or self.shift_y is None:
            return Moments.empty(self.layout)
        layout = self.layout
        starts, ends = layout.source_starts, layout.target_starts
        dx, dy = self.shift_x - shift_x, self.shift_y - shift_y
        sx, sy, n = self.sum_x, self.sum_y, self.count
        gram, cross = [], []
        for index in range(len(layout.sources)):
            own = slice(starts[index], starts[index + 1])
            partners = slice(starts[index], starts[layout.partners[index]])
            first, end = layout.served[index]
            served = slice(ends[first], ends[end])
            gram.append(self.gram[index] + _moved(dx[own], sx[own], dx[partners], sx[partners], n))
            cross.append(self.cross[index] + _moved(dx[own], sx[own], dy[served], sy[served], n))
        energy = self.energy + 2 * dy * sy + n * dy.square()
        return Moments(layout, n, shift_x, shift_y, sx + n * dx, sy + n * dy, gram, cross, energy)

    def mean_x(self) -> Float[Tensor, " source"]:
        """Mean of the source's rows."""
        assert self.shift_x is not None
        return self.shift_x + self.sum_x / self.count

    def mean_y(self) -> Float[Tensor, " target"]:
        """Mean of the target's rows."""
        assert self.shift_y is not None
        return self.shift_y + self.sum_y / self.count

    def gram_of(self, chosen: Sequence[int]) -> Float[Tensor, "width width"]:
        """``XᵀX`` of some sources (rising indices), symmetric."""
        starts = self.layout.source_starts
        widths = [self.layout.source_widths[index] for index in chosen]
        whole = torch.empty(sum(widths), sum(widths), dtype=torch.float64)
        row = 0
        for place, index in enumerate(chosen):
            column = row
            for other in chosen[place:]:
                begin = starts[other] - starts[index]
                part = self.gram[index][:, begin : begin + self.layout.source_widths[other]]
                if other == index:  # its halves were summed in other orders, and may differ in a bit
                    part = part.triu() + part.triu(1).T
                whole[row : row + part.shape[0], column : column + part.shape[1]] = part
                whole[column : column + part.shape[1], row : row + part.shape[0]] = part.T
                column += part.shape[1]
            row += self.layout.source_widths[index]
        return whole

    def cross_of(self, chosen: Sequence[int], target: int) -> Float[Tensor, "width target"]:
        """``XᵀY`` of some sources and one target."""
        ends = self.layout.target_starts
        parts = []
        for index in chosen:
            begin = ends[target] - ends[self.layout.served[index][0]]
            parts.append(self.cross[index][:, begin : begin + self.layout.target_widths[target]])
        return torch.cat(parts)

    def save(self, path: StrPath, note: str = "{}") -> int:
        """Write a valid safetensors file, whole or not at all, with a note of JSON; returns its bytes."""
        metadata = {"layout": json.dumps(self.layout.to_json()), "count": str(self.count), "note": note}
        return write_container(path, KIND, dict(self._tensors()), metadata)

    @classmethod
    def load(cls, path: StrPath, layout: Layout) -> tuple[Moments, object]:
        """What `save` wrote, and its note.

        Raises:
            CorruptPacket: no moments, or damaged ones.
            IncompatibleIdentity: of another layout.
            InvalidInput: there is no such file.
        """
        container = read_container(path, kind=KIND, mapped=False)
        with naming(path):
            stored = parse_json(container.metadata.get("layout", "null"), "the layout of the moments")
            if stored != layout.to_json():
                raise IncompatibleIdentity("these moments are of another fit", {"layout": ("another", layout.digest)})
            count = container.metadata.get("count", "")
            if not (count.isascii() and count.isdigit() and len(count) < 16):
                raise CorruptPacket(f"the moments are of {count[:20]!r} tokens")
            made = cls.empty(layout)
            made.count = int(count)
            made.shift_x, made.shift_y = torch.zeros_like(made.sum_x), torch.zeros_like(made.sum_y)
            tensors = dict(container.tensors)
            if not made.count and "shift_x" not in tensors:
                made.shift_x = made.shift_y = None
            for name, tensor in made._tensors():
                found = tensors.pop(name, None)
                if found is None or found.dtype != torch.float64 or found.shape != tensor.shape:
                    raise CorruptPacket(f"the moments have no tensor {name!r} of shape {tuple(tensor.shape)}")
                tensor.copy_(found)
            if tensors:
                raise CorruptPacket(f"the moments have tensors too many: {', '.join(sorted(tensors)[:4])}")
            return made, parse_json(container.metadata.get("note", "null"), "the note of the moments")

    def _sums(self) -> Iterator[tuple[str, Tensor]]:
        yield "sum_x", self.sum_x
        yield "sum_y", self.sum_y
        yield "energy", self.energy
        for index, (gram, cross) in enumerate(zip(self.gram, self.cross, strict=True)):
            yield f"gram.{index}", gram
            yield f"cross.{index}", cross

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.shift_x is not None and self.shift_y is not None:
            yield "shift_x", self.shift_x
            yield "shift_y", self.shift_y
        yield from self._sums()


def _moved(da: Tensor, sa: Tensor, db: Tensor, sb: Tensor, n: int) -> Tensor:
    """What ``Σ (a + da)(b + db)ᵀ`` has more than ``Σ a bᵀ``."""
    return torch.outer(sa, db) + torch.outer(da, sb + n * db)
