"""Peers of the codec that need nothing but torch: its own quantising ops, and what one writes by hand.

Each does its work as its users would have it done, memory included: what it allocates a call, it allocates a call.
Peers from other packages are in ``benchmarks/peers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.evaluate.bench_codec import Arm, Heads, Peer, Unavailable
from kvferry.ship.quantize import quantizer

ORACLE = ("sym8", "sym4", "asym4g64", "chan4b128")

Coded = tuple[Tensor, Tensor]


def make_arm(
    peer: str,
    what: str,
    encode: Callable[[], Any],
    decode: Callable[[Any], Tensor],
    nbytes: Callable[[Any], int],
    shape: torch.Size | None = None,
) -> Arm:
    """An arm out of a function that returns the encoded form, and one that takes it and returns values."""
    held: dict[str, Any] = {}

    def put() -> None:
        held["coded"] = encode()

    def get() -> None:
        held["values"] = decode(held["coded"])

    def values() -> Tensor:
        found: Tensor = held["values"]
        return found if shape is None else found.reshape(shape)

    return Arm(peer, what, put, get, lambda: nbytes(held["coded"]), values)


def tensor_bytes(*tensors: Tensor) -> int:
    """Bytes of several tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def absmax8(x: Tensor) -> Coded:
    """INT8 codes and an fp16 scale a row."""
    rows = x.float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-7)
    return (rows / scale).round().clamp(-127, 127).to(torch.int8), scale.half()


def restore8(coded: Coded, dtype: torch.dtype) -> Tensor:
    """Inverse of `absmax8`."""
    codes, scale = coded
    return (codes.float() * scale.float()).to(dtype)


def absmax4(x: Tensor) -> Coded:
    """INT4 codes, two a byte, and an fp16 scale a row."""
    rows = x.float()
    scale = (rows.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-7)
    codes = ((rows / scale).round().clamp(-7, 7) + 8).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.half()


def restore4(coded: Coded, dtype: torch.dtype) -> Tensor:
    """Inverse of `absmax4`."""
    packed, scale = coded
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return ((codes.float() - 8) * scale.float()).to(dtype)


HAND_WRITTEN: dict[str, tuple[Callable[[Tensor], Coded], Callable[..., Tensor]]] = {
    "int8 row": (absmax8, restore8),
    "int4 row": (absmax4, restore4),
}


def torch_oracle(x: Heads) -> Iterator[Arm]:
    """This project's torch reference: the same bytes as the kernels, what ``KVFERRY_NATIVE=0`` runs."""
    heads, tokens, dim = x.shape
    for spec in ORACLE:
        method = quantizer(spec)
        out = torch.zeros(method.nbytes(heads, tokens, dim, x.dtype), dtype=torch.uint8)
        y = torch.zeros_like(x)
        yield Arm(
            "torch oracle",
            spec,
            partial(method.encode, x, None, out),
            partial(method.decode, out, None, y),
            out.numel,
            y.detach,
        )


def torch_eager(x: Heads) -> Iterator[Arm]:
    """Plain absmax a row in eager torch."""
    for what, (encode, decode) in HAND_WRITTEN.items():
        yield make_arm(
            "torch eager",
            what,
            partial(encode, x),
            partial(decode, dtype=x.dtype),
            lambda coded: tensor_bytes(*coded),
        )


def torch_compile(x: Heads) -> Iterator[Arm]:
    """The same functions through ``torch.compile``."""
    for what, (encode, decode) in HAND_WRITTEN.items():
        fast_encode: Callable[[Tensor], Coded] = torch.compile(encode, dynamic=False)
        fast_decode: Callable[..., Tensor] = torch.compile(decode, dynamic=False)
        yield make_arm(
            "torch.compile",
            what,
            partial(fast_encode, x),
            partial(fast_decode, dtype=x.dtype),
            lambda coded: tensor_bytes(*coded),
        )


def fbgemm(x: Heads) -> Iterator[Arm]:
    """FBGEMM's row-wise ops in torch: fp32 or fp16 in, fp32 out, so that bf16 is converted on the way."""
    ops = torch.ops.quantized
    if not hasattr(ops, "embedding_bag_byte_prepack"):
        raise Unavailable("this torch was built without FBGEMM's row-wise ops")
    rows = x.flatten(0, 1)
    wide = rows.dtype in (torch.float32, torch.float16)

    def encode(pack: Callable[[Tensor], Tensor]) -> Tensor:
        return pack(rows if wide else rows.float())

    def decode(unpack: Callable[[Tensor], Tensor], coded: Tensor) -> Tensor:
        return unpack(coded).to(x.dtype)

    for what, pack, unpack in (
        ("uint8 row", ops.embedding_bag_byte_prepack, ops.embedding_bag_byte_unpack),
        ("uint4 row", ops.embedding_bag_4bit_prepack, ops.embedding_bag_4bit_unpack),
    ):
        yield make_arm(
            "FBGEMM in torch",
            what,
            partial(encode, pack),
            partial(decode, unpack),
            tensor_bytes,
            x.shape,
        )


PEERS: dict[str, Peer] = {
    "torch_oracle": torch_oracle,
    "torch_eager": torch_eager,
    "torch_compile": torch_compile,
    "fbgemm": fbgemm,
}
"""Name on the command line -> the peer."""
