"""Where keys and values lie in an engine's pages, found out by writing known values and looking for them.

An engine's cache of one layer is a tensor of blocks (pages) of ``block`` tokens. How a page is arranged depends on the
backend, on the machine and on the engine's version, and a wrong guess gives wrong text, not an error. So nothing is
guessed: `probe` lets the engine's own operation write, and takes the arrangement that explains every element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.errors import UnsupportedCache

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``(keys (tokens, heads, dim), values, cache, slots (tokens,))``: the engine's operation that fills its pages."""

_DIGIT = 128
"""Codes are written in digits below this: integers that even bfloat16 holds exactly."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page holds: ``block`` tokens of ``heads`` heads, keys and values of ``dim`` elements each."""

    heads: int
    block: int
    dim: int


class Layout(Protocol):
    """One arrangement of pages."""

    @property
    def name(self) -> str:
        """What the arrangement is called in messages."""

    def read(
        self, cache: Tensor, blocks: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]:
        """Keys and values of whole blocks, copied, in the order of ``blocks``."""

    def write(self, cache: Tensor, blocks: Int[Tensor, " n"], keys: Tensor, values: Tensor) -> None:
        """Inverse of `read`; ``keys`` and ``values`` are ``(heads, n * block, dim)``."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Keys and values are views of the cache.

    Attributes:
        name: see `Layout`.
        shape: of a page.
        views: cache → keys and values, ``(blocks, heads, block, dim)`` each, sharing its storage.
    """

    name: str
    shape: PageShape
    views: Callable[[Tensor, PageShape], tuple[Tensor, Tensor]]

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.views(cache, self.shape)
        return _by_token(keys[blocks]), _by_token(values[blocks])

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        for view, tensor in zip(self.views(cache, self.shape), (keys, values), strict=True):
            view[blocks] = _by_block(tensor, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PermutedLayout:
    """Each element has a place of its own within the page, as learned: packings for matrix units, for example.

    Attributes:
        name: see `Layout`.
        shape: of a page.
        places: int64 ``(2 * heads * block * dim,)``; where in the flattened page each element of (keys, values) lies.
    """

    name: str
    shape: PageShape
    places: Int[Tensor, " elements"] = field(repr=False)

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        pages = cache[blocks].reshape(len(blocks), -1)[:, self.places.to(cache.device)]
        both = pages.view(len(blocks), 2, self.shape.heads, self.shape.block, self.shape.dim)
        return _by_token(both[:, 0]), _by_token(both[:, 1])

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        both = torch.stack([_by_block(keys, self.shape), _by_block(values, self.shape)], 1)
        pages = torch.empty(len(blocks), both[0].numel(), dtype=cache.dtype, device=cache.device)
        pages[:, self.places.to(cache.device)] = both.reshape(len(blocks), -1).to(cache.device)
        cache[blocks] = pages.view(len(blocks), *cache.shape[1:])


def probe(writer: Writer, cache: Tensor, shape: PageShape, num_blocks: int) -> Layout:
    """The arrangement of ``cache``'s pages, as the engine writes them; ``cache`` itself is not touched.

    Args:
        writer: the engine's operation.
        cache: one layer's cache.
        shape: what a page holds.
        num_blocks: how many pages ``cache`` has.

    Raises:
        UnsupportedCache: no arrangement explains what the engine wrote.
    """
    scratch = _scratch(cache, num_blocks)
    blocks = torch.tensor([1], device=cache.device)
    keys, values = _random(shape, cache)
    _write(writer, scratch, keys, values, shape)
    fitting = [layout for layout in candidates(scratch, shape) if _fits(layout, scratch, blocks, keys, values)]
    if len(fitting) == 1:
        return fitting[0]
    learned = _learn(writer, scratch, shape)
    if learned is not None:
        _write(writer, scratch, keys, values, shape)
        if _fits(learned, scratch, blocks, keys, values):
            return learned
    raise UnsupportedCache(
        f"the engine's pages of {shape.block} tokens, {shape.heads} heads and {shape.dim} elements, a cache of shape "
        f"{tuple(cache.shape)} of {cache.dtype}, are arranged in no way that kvferry knows or can learn: a value "
        "written by the engine is not found again as it was (a quantised cache, perhaps)"
    )


def candidates(cache: Tensor, shape: PageShape) -> Iterator[StridedLayout]:
    """The known arrangements that a cache of this shape can have."""
    heads, block, dim = shape.heads, shape.block, shape.dim
    tail = tuple(cache.shape[1:])
    known: list[tuple[str, bool, Callable[[Tensor, PageShape], tuple[Tensor, Tensor]]]] = [
        ("cpu", tail == (heads, block, 2 * dim), _cpu_views),
        ("hnc", tail == (heads, block, 2 * dim), _joined_views),
        ("nhc", tail == (block, heads, 2 * dim), _joined_token_views),
        ("hnd", tail == (2, heads, block, dim), lambda c, _: (c[:, 0], c[:, 1])),
        ("nhd", tail == (2, block, heads, dim), lambda c, _: (c[:, 0].transpose(1, 2), c[:, 1].transpose(1, 2))),
    ]
    if cache.dim() == 5 and cache.shape[0] == 2:
        inner = tuple(cache.shape[2:])
        known += [
            ("hnd, keys first", inner == (heads, block, dim), lambda c, _: (c[0], c[1])),
            (
                "nhd, keys first",
                inner == (block, heads, dim),
                lambda c, _: (c[0].transpose(1, 2), c[1].transpose(1, 2)),
            ),
        ]
    for name, possible, views in known:
        if possible:
            yield StridedLayout(name, shape, views)


def _cpu_views(cache: Tensor, shape: PageShape) -> tuple[Tensor, Tensor]:
    """A (block, head) page is the keys transposed, ``(dim, block)``, and then the values, ``(block, dim)``."""
    count = cache.shape[0]
    halves = cache.view(count, shape.heads, 2, shape.block * shape.dim)
    keys = halves[:, :, 0].view(count, shape.heads, shape.dim, shape.block).transpose(-1, -2)
    return keys, halves[:, :, 1].view(count, shape.heads, shape.block, shape.dim)


def _joined_views(cache: Tensor, shape: PageShape) -> tuple[Tensor, Tensor]:
    return cache[..., : shape.dim], cache[..., shape.dim :]


def _joined_token_views(cache: Tensor, shape: PageShape) -> tuple[Tensor, Tensor]:
    swapped = cache.transpose(1, 2)
    return swapped[..., : shape.dim], swapped[..., shape.dim :]


def _by_token(pages: Float[Tensor, "n heads block dim"]) -> Float[Tensor, "heads tokens dim"]:
    return pages.transpose(0, 1).flatten(1, 2).contiguous()


def _by_block(tensor: Float[Tensor, "heads tokens dim"], shape: PageShape) -> Float[Tensor, "n heads block dim"]:
    heads, tokens, dim = tensor.shape
    return tensor.reshape(heads, tokens // shape.block, shape.block, dim).transpose(0, 1)


def _scratch(cache: Tensor, num_blocks: int) -> Tensor:
    """Two pages arranged as those of ``cache``, of zeros."""
    pages = cache.narrow(0 if cache.shape[0] == num_blocks else 1, 0, 2)
    return torch.zeros_like(pages, memory_format=torch.preserve_format)


def _write(writer: Writer, scratch: Tensor, keys: Tensor, values: Tensor, shape: PageShape) -> None:
    """Fill page 1 in two goes, the second of a single token, as a prefill and a decoding step would."""
    slots = torch.arange(shape.block, 2 * shape.block, dtype=torch.int64, device=scratch.device)
    for part in (slice(0, shape.block - 1), slice(shape.block - 1, shape.block)):
        writer(keys[part].contiguous(), values[part].contiguous(), scratch, slots[part])


def _random(shape: PageShape, cache: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, shape.block, shape.heads, shape.dim, generator=generator)
    keys, values = drawn.to(cache.dtype).to(cache.device)
    return keys, values


def _fits(layout: Layout, scratch: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether ``layout`` finds what was written, and writes the very page that the engine did."""
    try:
        found = layout.read(scratch, blocks)
        expected = (keys.transpose(0, 1), values.transpose(0, 1))
        if not all(torch.equal(have, want) for have, want in zip(found, expected, strict=True)):
            return False
        again = torch.zeros_like(scratch, memory_format=torch.preserve_format)
        layout.write(again, blocks, *expected)
    except RuntimeError:  # the cache has strides of which this layout's view cannot be made
        return False
    return torch.equal(again, scratch)


def _learn(writer: Writer, scratch: Tensor, shape: PageShape) -> PermutedLayout | None:
    """Write each element's own number, digit by digit, and see where it lands; ``None`` if that is no permutation."""
    if scratch.shape[0] != 2 or scratch[0].numel() != 2 * shape.heads * shape.block * shape.dim:
        return None
    count = scratch[0].numel()
    codes = torch.arange(count, device=scratch.device).view(2, shape.heads, shape.block, shape.dim)
    landed = torch.zeros(count, dtype=torch.int64, device=scratch.device)
    weight = 1
    while weight < count:
        digit = (codes // weight % _DIGIT).to(scratch.dtype).transpose(1, 2)
        scratch.zero_()
        _write(writer, scratch, digit[0], digit[1], shape)
        landed += scratch[1].reshape(-1).to(torch.int64) * weight
        weight *= _DIGIT
    scratch.zero_()
    if not torch.equal(landed.sort().values, torch.arange(count, device=landed.device)):
        return None
    return PermutedLayout("permuted", shape, landed.argsort())
