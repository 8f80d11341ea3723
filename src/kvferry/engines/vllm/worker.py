"""The worker's side: pages into packets, packets into pages. Knows tensors and the store; plans nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.crossing import Crossing, Declined
from kvferry.engines.vllm.jobs import LoadJob, SaveJob, StepJobs
from kvferry.engines.vllm.pages import Pages
from kvferry.engines.vllm.segments import make_segment
from kvferry.engines.vllm.stats import Counts
from kvferry.engines.vllm.store import Entry, Store, check_entry
from kvferry.errors import BudgetTooSmall, CorruptPacket, KVFerryError, UnsupportedCache
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.plan import COMPOSED, FAST
from kvferry.ship.policy.tiers import N_SINK
from kvferry.snapshot import Identity, Snapshot

logger = logging.getLogger(__name__)

PENDING_SAVES = 32
"""Chunks that wait for the thread that saves, at 16 bit in memory; after so many the engine waits for it."""

IDLE_WAIT = 0.002
"""Seconds that an engine with nothing to compute waits for a load before it looks for new requests again."""


class WorkerSide:
    """State: the engine's pages, loads and saves under way, and what failed since the engine last asked.

    Args:
        config: see there.
        store: where packets rest.
        identity: of the engine's model.
        pages: the engine's cache.
        crossing: from another model's packets, if that is what the store holds.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        store: Store,
        identity: Identity,
        pages: Pages,
        crossing: Crossing | None = None,
    ):
        self._config, self._store, self._identity, self._pages = config, store, identity, pages
        self._crossing = crossing
        self._loaders = ThreadPoolExecutor(1, "kvferry-load")
        self._savers = ThreadPoolExecutor(1, "kvferry-save")
        self._room = threading.BoundedSemaphore(PENDING_SAVES)
        self._lock = threading.Condition()
        self._loading = 0
        self._arrived: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._step_is_tainted = False
        self.counts = Counts()

    def start(self, jobs: StepJobs) -> None:
        """Begin the loads of a step; those that the step waits for are done when this returns."""
        self._step_is_tainted = False
        for job in jobs.loads:
            if job.background:
                with self._lock:
                    self._loading += 1
                self._loaders.submit(self._load, job).add_done_callback(_report)
            elif not self._load(job):
                self._step_is_tainted = True

    def finish(self, jobs: StepJobs) -> None:
        """Save the chunks that the step has completed."""
        if self._step_is_tainted:
            return  # what the step computed stands on pages that were not filled
        for job in jobs.saves:
            pairs = self._pages.read(job.blocks, job.entry.stop - job.entry.start)
            if self._config.save == "sync":
                self._save(job, pairs)
            else:
                self._room.acquire()
                future = self._savers.submit(self._save, job, pairs)
                future.add_done_callback(lambda _: self._room.release())
                future.add_done_callback(_report)

    def take_arrived(self, *, idle: bool = False) -> set[str]:
        """Requests whose background load has ended, well or not, since the last call.

        An engine with nothing to compute asks again and again, and would hold the interpreter against the very thread
        that loads: in an ``idle`` step this waits up to `IDLE_WAIT` for the next load to end.
        """
        with self._lock:
            if idle and self._loading and not self._arrived:
                self._lock.wait(IDLE_WAIT)
            arrived, self._arrived = self._arrived, set()
        return arrived

    def take_bad_blocks(self) -> set[int]:
        """Pages that could not be filled, since the last call."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed(self) -> set[str]:
        """Requests whose load failed, since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Wait for what is under way."""
        self._loaders.shutdown(wait=True)
        self._savers.shutdown(wait=True)

    def _load(self, job: LoadJob) -> bool:
        """Fill the pages of a job, entry by entry; whether all went well."""
        filled = job.start
        failure: BaseException | None = None
        try:
            if self._crossing is not None and job.first not in job.entries and self._crossing.unjudged(job.first.key):
                # That the engine has the first tokens by itself does not mean that the gate let them pass.
                judged = decode(self._read(job, job.first), max_bytes=self._config.max_bytes)
                with self.counts.timed("map_ms"):
                    self._crossing.map(judged, job.first.key)
            for entry in job.entries:
                self._fill(job, entry, filled)
                filled = min(entry.stop, job.stop)
        except Declined as error:
            failure = error
            self.counts.add("declined")
            logger.warning("request %s is computed here from token %d on: %s", job.request, filled, error)
        except (KVFerryError, OSError) as error:
            failure = error
            self.counts.add("load_failures")
            logger.error("request %s: tokens from %d on were not loaded: %s", job.request, filled, error)
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._lock:
                if failure is not None:
                    self._bad_blocks.update(job.blocks[(filled - job.start) // self._pages.block :])
                    self._failed.add(job.request)
                if job.background:
                    self._arrived.add(job.request)
                    self._loading -= 1
                    self._lock.notify()
        return failure is None

    def _fill(self, job: LoadJob, entry: Entry, start: int) -> None:
        """Put the tokens of an entry from ``start`` on, as far as they are wanted, into their pages."""
        stop = min(entry.stop, job.stop)
        packet = self._read(job, entry)
        with self.counts.timed("decode_ms"):
            snapshot = decode(packet, max_bytes=self._config.max_bytes)
        if self._crossing is not None:
            with self.counts.timed("map_ms"):
                snapshot = self._crossing.map(snapshot, job.first.key)
            self.counts.add("mapped_tokens", stop - start)
        with self.counts.timed("install_ms"):
            block = self._pages.block
            first, last = (start - job.start) // block, -(-(stop - job.start) // block)
            pairs = _pairs(snapshot, start - entry.start, stop - entry.start)
            short = [index for index, (keys, _) in enumerate(pairs) if keys.shape[1] != stop - start]
            if short:
                raise UnsupportedCache(
                    f"layers {short} slide over less than the packet and do not hold tokens {start}…{stop - 1} of it"
                )
            self._pages.write(job.blocks[first:last], pairs)
        self.counts.add("loaded_packets")
        self.counts.add("loaded_tokens", stop - start)
        self.counts.add("loaded_bytes", len(packet))
        self.counts.add("loaded_full_bytes", packet.full_bytes)

    def _read(self, job: LoadJob, entry: Entry) -> Packet:
        """An entry of the store, held against the prompt and the model that it is to be of."""
        want = self._identity if self._crossing is None else self._crossing.source
        with self.counts.timed("read_ms"):
            try:
                packet = self._store.get(entry.key, entry.kind)
                check_entry(packet.header, entry, job.token_ids, want)
            except CorruptPacket:
                self._store.discard(entry.key, entry.kind)
                raise
        return packet

    def _save(self, job: SaveJob, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put a chunk into the store; a failure is logged and counted: the engine's own work is not touched by it."""
        try:
            segment = make_segment(self._identity, job.token_ids, job.entry.start, job.entry.key, pairs)
            with self.counts.timed("encode_ms"):
                packet = self._encode(segment, N_SINK if job.entry.start == 0 else 0)
            if not bool(packet.header.mask.all()):
                raise UnsupportedCache(
                    f"policy {packet.policy} dropped tokens, which an engine's pages cannot leave out"
                )
            with self.counts.timed("write_ms"):
                self._store.put(job.entry.key, job.entry.kind, packet)
        except (KVFerryError, OSError) as error:
            self.counts.add("save_failures")
            logger.error("request %s: tokens from %d on were not saved: %s", job.request, job.entry.start, error)
            return
        self.counts.add("saved_packets")
        self.counts.add("saved_tokens", len(job.token_ids))
        self.counts.add("saved_bytes", len(packet))
        self.counts.add("saved_full_bytes", packet.full_bytes)

    def _encode(self, segment: Snapshot, n_sink: int) -> Packet:
        """The packet within the budget; a chunk that cannot be had for so little takes as little as it can.

        Left out, it would make every chunk behind it useless.
        """
        budget, policy = self._config.budget, FAST if self._config.policy in COMPOSED else self._config.policy
        try:
            return encode(segment, budget, policy, n_sink=n_sink)
        except BudgetTooSmall as error:
            logger.debug("a chunk takes a budget of %g: %s", error.least_budget, error)
            return encode(segment, error.least_budget, policy, n_sink=n_sink)


def _report(future: Future[Any]) -> None:
    """Nobody waits for a background job: what ended it is told in the log."""
    error = future.exception()
    if error is not None:
        logger.error("a job in the background ended with an error of kvferry's own", exc_info=error)


def _pairs(snapshot: Snapshot, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``(kv_heads, tokens, dim)`` of each layer that has its own, of tokens ``start … stop - 1``."""
    return [
        (layer.keys[0, :, start:stop], layer.values[0, :, start:stop])
        for layer in snapshot.layers
        if layer.keys is not None and layer.values is not None
    ]


def pages_by_layer(caches: Mapping[str, Tensor], layers: int) -> list[tuple[str, Tensor]]:
    """An engine's caches in the order of the model's layers: ``(name, cache)``.

    Raises:
        UnsupportedCache: a name without a layer's number, or not one cache for each of ``layers`` layers.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, cache in caches.items():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1 or numbers[0] in found:
            raise UnsupportedCache(f"cache {name!r} of the engine belongs to no single decoder layer")
        if not isinstance(cache, torch.Tensor):
            raise UnsupportedCache(f"cache {name!r} of the engine is a {type(cache).__name__}, not a tensor of pages")
        found[numbers[0]] = (name, cache)
    if len(found) != layers:
        raise UnsupportedCache(
            f"the engine has {len(found)} caches of layers, the model {layers} with keys of their own"
        )
    return [found[index] for index in sorted(found)]
