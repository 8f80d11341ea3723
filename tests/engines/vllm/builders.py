"""A small engine's pages on plain tensors, and requests as the scheduler's side sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvferry.engines.vllm.config import ConnectorConfig
from kvferry.engines.vllm.crossing import Crossing
from kvferry.engines.vllm.layout import PageShape, StridedLayout, candidates
from kvferry.engines.vllm.pages import Pages
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.store import FolderStore
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.snapshot import Identity, Snapshot
from tests.hf.tiny import llama, prompt

BLOCK = 32
CHUNK = 32


@dataclass
class Request:
    """What the connector reads of vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    output: list[int] = field(default_factory=list)
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output]


class Engine:
    """Both sides of a connector over pages of a tiny model."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        /,
        *,
        load: bool = True,
        save: bool = True,
        in_background: bool = False,
        crossing: Crossing | None = None,
        **settings: Any,
    ):
        when = "background" if in_background else "sync"
        self.config = ConnectorConfig.parse({"store": str(folder), "chunk_tokens": CHUNK, "save": when, **settings})
        self.store = FolderStore(folder)
        wanted = identity if crossing is None else crossing.source
        least = 0 if crossing is None else crossing.least_first
        self.scheduler = SchedulerSide(self.config, self.store, wanted, BLOCK, load=load, save=save, least_first=least)
        self.pages = make_pages(identity)
        self.worker = WorkerSide(self.config, self.store, identity, self.pages, crossing)


def consume(engine: Engine, request: Request, computed: int = 0, first: int = 5) -> tuple[int, list[int]]:
    """Let an engine take up a prompt; tokens found, and pages of the prompt in order."""
    engine.scheduler.admit(request)
    found, background = engine.scheduler.matched(request, computed)
    blocks = list(range(first, first + len(request.prompt_token_ids) // BLOCK + 1))
    engine.scheduler.allocated(request, blocks, found)
    jobs = engine.scheduler.step([], lambda _: blocks)
    engine.worker.start(jobs)
    if background:
        engine.worker.close()
    return found, blocks


def make_pages(identity: Identity, blocks: int = 16) -> Pages:
    caches, layouts = [], []
    for geometry in identity.layers:
        shape = PageShape(geometry.kv_heads, BLOCK, geometry.head_dim)
        cache = torch.zeros(blocks, 2, shape.heads, BLOCK, shape.dim, dtype=getattr(torch, identity.dtype))
        caches.append(cache)
        (layout,) = candidates(cache, shape)
        assert isinstance(layout, StridedLayout)
        layouts.append(layout)
    return Pages(BLOCK, tuple(caches), tuple(layouts))


def pairs_of(snapshot: Snapshot, start: int, stop: int) -> list[tuple[Any, Any]]:
    return [(layer.keys[0, :, start:stop], layer.values[0, :, start:stop]) for layer in snapshot.layers]


def captured(tokens: int = 128, seed: int = 0, **changes: Any) -> tuple[Any, Snapshot]:
    """A tiny model and its cache of a random prompt."""
    from kvferry.hf.capture import capture

    model = llama(seed, torch.bfloat16, **changes)
    return model, capture(model, prompt(1, tokens, seed))
