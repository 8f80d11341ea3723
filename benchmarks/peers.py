"""Codecs of other packages, on the same tensors; each is skipped with its reason where it cannot run.

They are no dependencies: ``pip install -e ".[bench]"`` brings those that install without much, see pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvferry.evaluate.bench_codec import Arm, Heads, Peer, Unavailable
from kvferry.evaluate.codec_peers import PEERS as TORCH_PEERS
from kvferry.evaluate.codec_peers import make_arm, tensor_bytes


def _cache_arm(name: str, what: str, make: Callable[[], Any], x: Heads, nbytes: Callable[[Any], int]) -> Arm:
    """A layer of transformers' QuantizedCache: what it does to the keys of a prefill, and what it gives attention.

    The two private methods are called, for keys alone: `update` on a filled cache would also copy what it returns.
    """
    layer = make()
    layer.lazy_initialization(x[None], x[None])
    return make_arm(
        name,
        what,
        lambda: layer._quantize(x[None].contiguous(), axis=layer.axis_key),
        lambda coded: layer._dequantize(coded).to(x.dtype),
        nbytes,
        x.shape,
    )


def quanto(x: Heads) -> Iterator[Arm]:
    """transformers' QuantizedCache with optimum-quanto, at its defaults (groups of 64)."""
    import optimum.quanto  # noqa: F401  (only what it is missing for is said here)
    from transformers.cache_utils import QuantoQuantizedLayer

    def nbytes(coded: Any) -> int:
        return tensor_bytes(coded._data._data, coded._scale, coded._shift)

    yield _cache_arm("transformers + quanto", "int4 g64", lambda: QuantoQuantizedLayer(nbits=4), x, nbytes)


def hqq(x: Heads) -> Iterator[Arm]:
    """transformers' QuantizedCache with HQQ, at its defaults (groups of 64)."""
    import hqq.core.quantize  # noqa: F401
    from transformers.cache_utils import HQQQuantizedLayer

    def nbytes(coded: Any) -> int:
        return tensor_bytes(coded[0], coded[1]["scale"], coded[1]["zero"])

    for nbits in (8, 4):
        yield _cache_arm(
            "transformers + hqq",
            f"int{nbits} g64",
            lambda nbits=nbits: HQQQuantizedLayer(nbits=nbits, axis_key=1, axis_value=1),
            x,
            nbytes,
        )


def torchao(x: Heads) -> Iterator[Arm]:
    """torchao's affine primitives, symmetric, a scale a row; its INT4 codes lie one in a byte."""
    from torchao.quantization import quant_primitives as ao

    block = (1, 1, x.shape[2])
    for what, low, high in (("int8 row", -127, 127), ("int4 row, unpacked", -7, 7)):

        def encode(low: int = low, high: int = high) -> tuple[Tensor, Tensor, Tensor]:
            scale, zero = ao.choose_qparams_affine(
                x, ao.MappingType.SYMMETRIC, block, torch.int8, low, high, scale_dtype=torch.float32
            )
            return ao.quantize_affine(x, block, scale, zero, torch.int8, low, high), scale, zero

        def decode(coded: tuple[Tensor, Tensor, Tensor], low: int = low, high: int = high) -> Tensor:
            codes, scale, zero = coded
            return ao.dequantize_affine(codes, block, scale, zero, torch.int8, low, high, output_dtype=x.dtype)

        yield make_arm("torchao", what, encode, decode, lambda coded: tensor_bytes(*coded))


def kvcodec(x: Heads) -> Iterator[Arm]:
    """The PyPI package kvcodec: anchors and INT8 residuals along the sequence; one half as keys, one as values."""
    from kvcodec.codec import CodecConfig, KVCodec

    codec, half = KVCodec(CodecConfig()), x.shape[1] // 2

    def decode(coded: Any) -> Tensor:
        return torch.cat(codec.decompress(coded), dim=1).to(x.dtype)

    def encode() -> Any:
        return codec.compress(x[:, :half].float(), x[:, half : 2 * half].float())

    yield make_arm("kvcodec", "anchors + int8 residuals", encode, decode, lambda coded: coded.bytes_compressed())


def tqai(x: Heads) -> Iterator[Arm]:
    """lmcache-turbo-quant-serde, its form that needs no LMCache, 4 bits."""
    from lmcache_turbo_quant_serde import TurboQuantDeserializer, TurboQuantSerializer

    writer, reader = TurboQuantSerializer(bits=4), TurboQuantDeserializer()
    yield make_arm(
        "lmcache-turbo-quant-serde",
        "TurboQuant 4 bit",
        lambda: writer.to_bytes(x),
        lambda coded: reader.from_bytes(coded).to(x.dtype),
        len,
    )


def lmcache_fp8(x: Heads) -> Iterator[Arm]:
    """LMCache's fp8 serde: a cast."""
    from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

    writer, reader = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    data, out = (SimpleNamespace(tensor=torch.zeros(x.shape, dtype=kind)) for kind in (torch.uint8, x.dtype))
    yield Arm(
        "lmcache fp8",
        "fp8 e4m3",
        lambda: writer.serialize(SimpleNamespace(tensor=x), data, None),
        lambda: reader.deserialize(data, out, None),
        lambda: data.tensor.nbytes,
        lambda: out.tensor,
    )


def lmcache_turboquant(x: Heads) -> Iterator[Arm]:
    """LMCache's own TurboQuant serde."""
    import lmcache.v1.distributed.serde.turboquant.turboquant  # noqa: F401

    raise Unavailable("LMCache's turboquant serde stages everything on a CUDA device: there is no CPU path")


PEERS: dict[str, Peer] = {
    **TORCH_PEERS,
    "quanto": quanto,
    "hqq": hqq,
    "torchao": torchao,
    "kvcodec": kvcodec,
    "turbo_quant_serde": tqai,
    "lmcache_fp8": lmcache_fp8,
    "lmcache_turboquant": lmcache_turboquant,
}
"""Name on the command line -> the peer."""
