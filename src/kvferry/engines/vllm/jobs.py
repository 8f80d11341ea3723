"""What the scheduler's side tells the worker's side to do in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engines.vllm.store import Entry


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill the pages of one request from the store.

    Attributes:
        request: its id.
        entries: packets that cover the tokens up to the last one's ``stop``, in order.
        first: the prompt's first packet, whether it is needed or the engine has its tokens already.
        start: first token whose page is to be filled; what lies before is there already.
        stop: first token that is left to the engine; the last entry may hold it, too.
        token_ids: of the prompt, up to the last entry's ``stop``.
        blocks: pages of the tokens from ``start`` on, the last one perhaps not full.
        background: the request waits apart; say so when it is ready.
    """

    request: str
    entries: tuple[Entry, ...]
    first: Entry
    start: int
    stop: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    background: bool


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Put one chunk of a request, or its tail, into the store once this step has computed it.

    Attributes:
        request: its id.
        entry: what it becomes.
        token_ids: of the chunk.
        blocks: pages of the chunk; of a tail the last one may not be full.
    """

    request: str
    entry: Entry
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Everything for one step; ``idle``: the engine computes nothing in it, and has nothing under way."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    idle: bool = False
