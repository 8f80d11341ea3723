"""The serde as LMCache knows it: a serialiser, its inverse, and the factory that makes both from an adapter's settings.

LMCache 0.5.6, ``lmcache/v1/distributed/serde``. What LMCache puts around an adapter asks for the size, lends a buffer
of it from L1, and runs both directions in threads of its own; what is raised is logged with its message, and the chunks
of that call count as not stored, or as missing.
"""

from __future__ import annotations

import threading

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj
from torch import Tensor

from kvferry.engines.lmcache import codec
from kvferry.engines.lmcache.chunk import ChunkShape
from kvferry.engines.lmcache.config import NAME, SerdeConfig
from kvferry.errors import InvalidInput, TooLarge

_registering = threading.Lock()


def register() -> None:
    """Make ``{"serde": {"type": "kvferry", …}}`` known to LMCache in this process; again is no harm.

    The settings are those of `kvferry.engines.lmcache.config.SerdeConfig`.
    """
    with _registering:
        if NAME not in get_registered_serde_types():
            register_serde_factory(NAME, create)


def create(settings: dict[str, object]) -> SerdeProcessor:
    """The serde with these settings; raises `InvalidInput` where they are wrong."""
    config = SerdeConfig.parse(settings)
    return AsyncSerdeProcessor(KVFerrySerializer(config), KVFerryDeserializer(config), max_workers=config.max_workers)


class KVFerrySerializer(Serializer):
    """Chunks to packets. It holds nothing but its settings: any number of threads may use it."""

    def __init__(self, config: SerdeConfig):
        self.config = config

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Encode ``src`` into the bytes of ``dst``; returns how many of them are to be stored.

        Raises:
            UnsupportedCache, IncompatibleIdentity: not a chunk of the model that the settings speak of.
            BudgetTooSmall, TooLarge: it does not get as small as the settings ask for.
        """
        shape = ChunkShape.of(src.get_shapes(), src.get_dtypes(), self.config)
        size = codec.room(shape, self.config)
        out = memoryview(dst.byte_array).cast("B")
        if len(out) < size:
            raise TooLarge(f"a chunk takes {size:,} bytes; LMCache's buffer has {len(out):,}")
        codec.write(codec.encode(_tensor(src), shape, self.config, key), out[:size])
        return size

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Bytes that any chunk of this layout takes; raises as `serialize` does for one that is not carried."""
        return codec.room(ChunkShape.of(layout_desc.shapes, layout_desc.dtypes, self.config), self.config)


class KVFerryDeserializer(Deserializer):
    """Packets to chunks. It holds nothing but its settings: any number of threads may use it."""

    def __init__(self, config: SerdeConfig):
        self.config = config

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode ``src`` into ``dst``, which is left alone if anything is wrong.

        Raises:
            CorruptPacket, UnsupportedVersion, TooLarge: the bytes are damaged, or no packet.
            IncompatibleIdentity: they are of another model, key or shape; names what differs.
            UnsupportedCache: ``dst`` is no chunk that this serde carries.
        """
        shape = ChunkShape.of(dst.get_shapes(), dst.get_dtypes(), self.config)
        codec.decode(memoryview(src.byte_array).cast("B"), _tensor(dst), shape, self.config, key)


def _tensor(memory: MemoryObj) -> Tensor:
    tensor: Tensor | None = memory.tensor
    if tensor is None:
        raise InvalidInput("LMCache's memory object has been given back: it holds no tensor")
    return tensor
