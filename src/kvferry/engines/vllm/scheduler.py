"""The scheduler's side: which prefixes the store has, which pages to fill, which chunks to save. Touches no tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.engines.vllm.chain import LEAST_TAIL, chain_and_tail
from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.jobs import LoadJob, SaveJob, StepJobs
from kvferry.engines.vllm.lookup import longest
from kvferry.engines.vllm.stats import Counts
from kvferry.engines.vllm.store import Entry, Store
from kvferry.errors import IncompatibleIdentity
from kvferry.snapshot import Identity

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's placeholder for a page that a request no longer has."""

BlocksOf = Callable[[str], Sequence[int] | None]


class SchedulerSide:
    """State: requests that the engine has admitted, the prefix found for each, and the loads of the step to come.

    Args:
        config: see there.
        store: where packets rest.
        identity: of the model whose packets are taken and made.
        block_size: tokens a page.
        load: whether this engine takes packets (a consumer).
        save: whether it makes them (a producer).
        least_first: tokens that a prompt's first packet has at least, for it to be of use.
        alone: whether no other engine keeps step with this one.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        store: Store,
        identity: Identity,
        block_size: int,
        *,
        load: bool,
        save: bool,
        least_first: int = 0,
        alone: bool = True,
    ):
        self._config, self._store, self._identity, self._block = config, store, identity, block_size
        self._chunk = config.chunk(block_size)
        self._load, self._save, self._least_first = load, save, least_first
        self._alone, self._was_busy = alone, False
        self._requests: dict[str, Any] = {}
        self._found: dict[str, tuple[int, tuple[Entry, ...]]] = {}
        self._loads: list[LoadJob] = []
        self._seen: set[str] = set()
        self._begun: set[str] = set()
        self._failed: set[str] = set()
        self.counts = Counts()

    def admit(self, request: Any) -> None:
        """Remember a request that has come in."""
        if carried(request):
            self._requests[request.request_id] = request

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens beyond the ``computed`` local ones the store has, and whether they come in the background.

        Raises:
            IncompatibleIdentity: the store has the prefix of another model, and the settings say to stop then.
        """
        if not self._load or not carried(request) or request.request_id in self._failed:
            return 0, False
        reach = len(request.all_token_ids) - 1  # at least one token is left to compute
        first_look = request.request_id not in self._seen
        self._seen.add(request.request_id)
        if first_look:
            self.counts.add("lookups")
        if reach <= computed:
            return 0, False
        tokens = list(request.prompt_token_ids)
        keys, last = self._names(tokens)
        try:
            entries = longest(self._store, keys, self._chunk, tokens, self._identity, last)
        except IncompatibleIdentity as error:
            if self._config.identity == "raise":
                raise
            if first_look:
                self.counts.add("refusals")
                logger.error("request %s is computed here: %s", request.request_id, error)
            return 0, False
        usable = bool(entries) and entries[0].stop >= self._least_first
        stop = min(entries[-1].stop, reach) if usable else 0
        if stop - computed < LEAST_TAIL:
            return 0, False
        if first_look:
            self.counts.add("hits")
            self.counts.add("hit_tokens", stop - computed)
        self._found[request.request_id] = (computed, entries)
        return stop - computed, self._config.mode == "async"

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """The engine has pages for ``external`` tokens of the store; plan to fill them in the next step."""
        if external == 0:
            return
        start, entries = self._found.pop(request.request_id)
        stop = start + external
        needed = tuple(entry for entry in entries if entry.stop > start)
        self._loads.append(
            LoadJob(
                request=request.request_id,
                entries=needed,
                first=entries[0],
                start=start,
                stop=stop,
                token_ids=tuple(request.prompt_token_ids[: entries[-1].stop]),
                blocks=tuple(blocks[start // self._block : -(-stop // self._block)]),
                background=self._config.mode == "async",
            )
        )

    def step(self, scheduled: Sequence[tuple[str, int, int]], blocks_of: BlocksOf) -> StepJobs:
        """The jobs of the step that begins, and a clean slate for the next.

        Args:
            scheduled: ``(request id, tokens computed before, tokens computed in this step)``.
            blocks_of: request id → its pages.
        """
        loads, self._loads = self._loads, []
        saves: list[SaveJob] = []
        if self._save:
            planned: set[str] = set()
            for name, before, count in scheduled:
                saves += self._saves(name, before, before + count, blocks_of, planned)
        idle, self._was_busy = not scheduled and not self._was_busy, bool(scheduled)
        return StepJobs(loads, saves, idle and self._alone)

    def failed(self, requests: Iterable[str]) -> None:
        """These requests' loads failed: what the engine still wants of them it computes, however often it asks."""
        self._failed.update(requests)

    def finished(self, request: Any) -> None:
        """Forget a request."""
        name = request.request_id
        self._requests.pop(name, None)
        self._found.pop(name, None)
        for memory in (self._seen, self._begun, self._failed):
            memory.discard(name)

    def _saves(self, name: str, before: int, after: int, blocks_of: BlocksOf, planned: set[str]) -> list[SaveJob]:
        """Chunks of the prompt that are whole after this step, and its tail, that the store lacks.

        A prompt's first step looks at every chunk, those of the local prefix cache too: another engine may not have
        them. After that only what becomes whole can be new.
        """
        request = self._requests.get(name)
        if request is None:
            return []
        length = request.num_prompt_tokens
        whole = min(after, length) // self._chunk
        done = before // self._chunk if name in self._begun else 0
        ends = after >= length and (before < length or name not in self._begun)
        self._begun.add(name)
        if whole <= done and not ends:
            return []
        tokens = list(request.prompt_token_ids)
        keys, last = self._names(tokens)
        entries = [
            Entry(keys[index], "segment", index * self._chunk, (index + 1) * self._chunk)
            for index in range(done, whole)
        ]
        blocks = blocks_of(name)
        saves = []
        for entry in [*entries, *([last] if ends and last is not None else [])]:
            if blocks is None or entry.key in planned or self._store.has(entry.key, entry.kind):
                continue
            pages = tuple(blocks[entry.start // self._block : -(-entry.stop // self._block)])
            if NULL_BLOCK in pages or len(pages) != -(-(entry.stop - entry.start) // self._block):
                continue
            planned.add(entry.key)
            saves.append(SaveJob(name, entry, tuple(tokens[entry.start : entry.stop]), pages))
        return saves

    def _names(self, prompt: Sequence[int]) -> tuple[list[str], Entry | None]:
        """The keys of a prompt's whole chunks, and its tail; ``None``: too little, or it is not to be kept."""
        keys, last = chain_and_tail(prompt, self._chunk, self._config.namespace)
        if last is None or not self._config.tails:
            return keys, None
        return keys, Entry(last, "segment", len(keys) * self._chunk, len(prompt))


def carried(request: Any) -> bool:
    """Whether a request's cache follows from its tokens alone: no adapter, no images, no embeddings, no salt."""
    return (
        getattr(request, "lora_request", None) is None
        and not getattr(request, "mm_features", None)
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "cache_salt", None) is None
        and getattr(request, "prompt_token_ids", None) is not None
    )
