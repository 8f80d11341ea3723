"""LMCache's storage manager as its server builds it, and what it reports: stores that ended, errors that it logged.

Nothing here stands in for a part of LMCache. Every wait ends with an event of LMCache's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus
from torch import Tensor

from kvferry.engines.lmcache import register
from tests.engines.lmcache.builders import SETTINGS, Key

PATIENCE = 120.0
"""Seconds after which a test that waits has failed."""

LOGGERS = (
    "lmcache.v1.distributed.serde.async_processor",
    "lmcache.v1.distributed.storage_controllers.store_controller",
    "lmcache.v1.distributed.storage_controllers.prefetch_controller",
)


def object_key(number: int, **more: Any) -> ObjectKey:
    """A key with a chunk hash of its own."""
    fields = {"model_name": Key().model_name, "kv_rank": Key().kv_rank, **more}
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), **fields)


def layout_of(chunk: Tensor) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(shapes=[chunk.shape], dtypes=[chunk.dtype])


class Errors(logging.Handler):
    """Exceptions that LMCache logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Queue[BaseException] = Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.put(record.exc_info[1])

    def next(self) -> BaseException:
        """The next one; waits for it."""
        return self.found.get(timeout=PATIENCE)


class Storage:
    """A storage manager, with waits."""

    def __init__(self, folder: Path, adapter: dict[str, Any], serde: dict[str, Any]):
        self.folder = folder
        self.stores: Queue[Event] = Queue()
        bus = init_event_bus(EventBusConfig())
        bus.subscribe(EventType.L2_STORE_COMPLETED, self.stores.put)
        bus.start()
        self.bus = bus
        spec = {**adapter, "serde": {"type": "kvferry", **SETTINGS, **serde}}
        arguments = ["--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "noop"]
        self.manager = StorageManager(parse_args([*arguments, "--l2-adapter", json.dumps(spec)]))

    def put(self, chunks: dict[ObjectKey, Tensor]) -> None:
        """Write chunks into L1; the store controller then takes them to L2 by itself."""
        keys = list(chunks)
        objects = self.manager.reserve_write(keys, layout_of(next(iter(chunks.values()))))
        assert list(objects) == keys
        for key, memory in objects.items():
            memory.tensor.copy_(chunks[key])
        self.manager.finish_write(keys)

    def stored(self, count: int, failed: int = 0) -> int:
        """Wait until so many chunks are in L2, and so many have failed; returns the bytes that were written."""
        nbytes, seen = 0, [0, 0]
        while sum(seen) < count + failed:
            metadata = self.stores.get(timeout=PATIENCE).metadata
            seen[0] += metadata["succeeded_count"]
            seen[1] += metadata["failed_count"]
            nbytes += metadata["bytes_transferred"]
        assert seen == [count, failed]
        return nbytes

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """Drop chunks from L1: what is read afterwards comes from L2."""
        assert self.manager.delete_l1_keys(list(keys)) == (len(keys), 0)
        assert self.manager.get_l1_usage()[0] == 0

    def get(self, keys: Sequence[ObjectKey], like: Tensor) -> dict[ObjectKey, Tensor]:
        """Fetch chunks into L1 and read them; those that L2 does not have, or does not get decoded, are left out."""
        row = GroupedObjectKeys(keys=list(keys), object_group_id=keys[0].object_group_id, layout_desc=layout_of(like))
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=[row], fetching_policy="full"))
        assert self.manager.wait_prefetch_status(handle, PATIENCE)
        result = self.manager.query_prefetch_status(handle)
        hits = [keys[index] for index in result.hit_cells[0].get_indices_list()]
        assert result.l1_hit_count == 0
        assert result.l2_hit_count == len(hits)
        if not hits:
            return {}
        with self.manager.read_prefetched_results(hits, result.l1_owners) as objects:
            found = {key: memory.tensor.clone() for key, memory in zip(hits, objects, strict=True)}
        self.manager.finish_read_prefetched(hits, l1_owners=result.l1_owners)
        return found

    def file(self, key: ObjectKey) -> Path:
        """Where the file adapter keeps a chunk."""
        (found,) = self.folder.glob(f"*{key.chunk_hash.hex()}*")
        return found

    def close(self) -> None:
        self.manager.close()
        self.bus.stop()


Open = Callable[..., Storage]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Open]:
    """``storage(adapter="fs", **serde)``; opened again, it finds what the one before it left in the folder."""
    register()
    opened: list[Storage] = []

    def make(adapter: str = "fs", **serde: Any) -> Storage:
        while opened:
            opened.pop().close()
        more: dict[str, Any] = {"base_path": str(tmp_path)}
        if adapter == "mock":
            more = {"max_size_gb": 0.1, "mock_bandwidth_gb": 10}
        opened.append(Storage(tmp_path, {"type": adapter, **more}, serde))
        return opened[0]

    yield make
    while opened:
        opened.pop().close()


@pytest.fixture
def errors() -> Iterator[Errors]:
    """What LMCache logs of exceptions while the test runs."""
    handler = Errors()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    yield handler
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(handler)
