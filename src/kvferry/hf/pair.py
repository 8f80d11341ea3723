"""A matched-KV pair: a model, and a smaller one with the same kv heads, head size and tokenizer.

A family of two sizes is seldom at hand; one can be made the way that vendors make theirs, by dropping layers and
training what is left on the larger one's predictions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.evidence.log import digest
from kvferry.hf.distil import cross_entropy, distillation, divergence
from kvferry.hf.identity import identity_of, tokenizer_hash
from kvferry.hf.made import existing, put, working_folder
from kvferry.hf.prune import (
    FIRST,
    LAST,
    block_influence,
    child_of,
    choose_layers,
    decoder_layers,
    restore_layers,
    watched_states,
    without_layers,
)
from kvferry.hf.train import OnStep, TrainSettings, train
from kvferry.snapshot.files import write_text
from kvferry.snapshot.folders import cache_folder
from kvferry.snapshot.strict_json import parse_json
from kvferry.version import __version__

_CHECKPOINT = "training.safetensors"
_CHOICE = "layers.json"

OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PairSettings:
    """How a child is made.

    Attributes:
        layers: that it has; ``None`` for two thirds of the parent's.
        training: how long it is trained, and how fast.
        window: tokens that it is trained on at a time.
        states_weight: weight of the parent's states in the loss, beside its predictions.
        measured: tokens that the influence of layers is measured on.
        reconsidered: how many more layers than shall go are looked at, as a share of those that shall: influence says
            which they are, and of them those are taken back that cost the most when all are gone.
        tried: tokens that this is measured on.
        held_out: share of each text's end that is not trained on.
        looked_at: most windows of the held-out text that are scored before and after.
    """

    training: TrainSettings
    layers: int | None = None
    window: int = 256
    states_weight: float = 0.5
    measured: int = 4096
    reconsidered: float = 0.4
    tried: int = 768
    held_out: float = 0.02
    looked_at: int = 16

    def __post_init__(self) -> None:
        if self.window < 8:
            raise InvalidInput(f"windows of {self.window} tokens are too short to train on: 8 is the least")
        if not 0 <= self.reconsidered <= 1:
            raise InvalidInput(f"reconsidered is {self.reconsidered}; it is a share from 0 to 1")
        if not 0 <= self.held_out < 0.5 or self.states_weight < 0 or min(self.measured, self.tried, self.looked_at) < 1:
            raise InvalidInput(
                "held_out is a share below 0.5, states_weight 0 or more, measured and looked_at 1 or more"
            )


@dataclass(frozen=True, slots=True)
class PairResult:
    """A child, and how it came about.

    Attributes:
        path: its folder, which `load_model` takes.
        kept: the parent's layers that it has.
        made: everything else: settings, texts by digest, influence of each layer, progress, and the mean negative
            log-likelihood of held-out tokens (nats) of the parent and of the child before and after.
        found: nothing was done: the folder was there already.
    """

    path: str
    kept: tuple[int, ...]
    made: dict[str, Any]
    found: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pairs_folder() -> Path:
    """Where children are kept."""
    return cache_folder() / "pairs"


def make_pair(
    parent: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    settings: PairSettings,
    *,
    name: str,
    folder: str | Path | None = None,
    on_step: OnStep | None = None,
    on_stage: OnStage | None = None,
) -> PairResult:
    """Make a child of ``parent``: keep the layers of most influence, train them on the parent's predictions, save.

    The folder appears whole or not at all. A process that is killed on the way leaves a checkpoint beside it; called
    again with the same arguments, the work goes on there (see `kvferry.hf.train.train`).

    Args:
        parent: from `load_model`; its dtype is that of the products, and of the child.
        tokenizer: its tokenizer, which is the child's too.
        texts: what to train on; the end of each is held out.
        settings: how.
        name: the parent's name, for the child's folder and its record.
        folder: the child's; by default one in `pairs_folder`, named after the parent and all of the settings.
        on_step: told after each step of the training.
        on_stage: told what is done next.

    Raises:
        InvalidInput: settings that make no sense, a text too short, a model that cannot be pruned or distilled so, a
            folder that holds something else, or another process at the same work.
        CorruptPacket: a damaged checkpoint.
    """
    if parent.dtype == torch.float16:
        raise InvalidInput("gradients vanish in float16: load the parent in bfloat16 or float32")
    say = on_stage or (lambda _what: None)
    count = len(decoder_layers(parent))
    keep = settings.layers if settings.layers is not None else round(count * 2 / 3)
    choose_layers([0.0] * count, keep)  # a wrong number is said before the work, not after the first part of it
    say("reading the texts")
    training, held = _windows(tokenizer, texts, settings)
    identity = identity_of(parent, tokenizer)
    recipe = {
        "parent": name,
        "parent_weights": identity.weights,
        "tokenizer": tokenizer_hash(tokenizer),
        "dtype": identity.dtype,
        "attention": identity.attention,
        "layers": keep,
        "settings": asdict(replace(settings, layers=keep)),
        "windows": [len(training), digest(training.tolist())],
        "held_out_windows": [len(held), digest(held.tolist())],
    }
    bound_to = digest(recipe)
    target = (
        pairs_folder() / f"{_plain(name)}-{keep}of{count}-{bound_to[:12]}"
        if folder is None
        else Path(folder).expanduser()
    )
    found = existing(target, bound_to)
    if found is not None:
        return PairResult(str(target), tuple(found["kept"]), found["made"], True)
    with working_folder(target) as work:
        found = existing(target, bound_to)  # made by another process while this one waited
        if found is not None:
            return PairResult(str(target), tuple(found["kept"]), found["made"], True)
        kept, choice = _chosen(work / _CHOICE, bound_to, lambda: _choose(parent, training, settings, keep, say))
        child = child_of(parent, kept)
        weights, loss_of = distillation(parent, child, kept, states_weight=settings.states_weight)
        scores: dict[str, float | None] = {"parent": None, "child_before": None, "child": None}
        checkpoint = work / _CHECKPOINT
        looked_at = held[: settings.looked_at]
        if len(looked_at):
            say("scoring held-out text")
            scores["parent"] = cross_entropy(parent, looked_at)
            scores["child_before"] = cross_entropy(child, looked_at)
        say("training")
        progress = train(
            weights, loss_of, training, settings.training, checkpoint=checkpoint, bound_to=bound_to, on_step=on_step
        )
        if len(looked_at):
            say("scoring held-out text")
            scores["child"] = cross_entropy(child, looked_at)
        made = {
            **recipe,
            "kvferry": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "choice": choice,
            "progress": progress.to_json(),
            "held_out_nll": scores,
        }
        say("saving")
        put(work, target, {"": child}, tokenizer, {"digest": bound_to, "kept": list(kept), "made": made})
    return PairResult(str(target), kept, made, False)


def _windows(tokenizer: Any, texts: Sequence[str], settings: PairSettings) -> tuple[Tensor, Tensor]:
    """Disjoint windows to train on, and those held out, of all texts."""
    training, held = [], []
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        whole = len(ids) // settings.window
        if whole < 1:
            raise InvalidInput(
                f"text {number + 1} has {len(ids)} tokens, not even one window of {settings.window}: give a longer one"
            )
        windows = torch.tensor(ids[: whole * settings.window], dtype=torch.int64).view(whole, settings.window)
        apart = min(whole - 1, -int(-whole * settings.held_out // 1))
        training.append(windows[: whole - apart])
        held.append(windows[whole - apart :])
    if not training:
        raise InvalidInput("there is no text to train on")
    return torch.cat(training), _spread(torch.cat(held), settings.looked_at)


def _spread(windows: Tensor, count: int) -> Tensor:
    """Up to ``count`` of ``windows``, from all over them."""
    if len(windows) <= count:
        return windows
    return windows[torch.arange(count) * len(windows) // count]


def _chosen(
    path: Path, bound_to: str, choose: Callable[[], tuple[tuple[int, ...], dict[str, Any]]]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What an earlier process chose and kept in ``path``, else what is chosen now."""
    if path.exists():
        found = parse_json(path.read_text(encoding="utf-8"), f"{path}")
        if isinstance(found, dict) and found.get("digest") == bound_to:
            return tuple(found["kept"]), found["choice"]
    kept, choice = choose()
    write_text(path, json.dumps({"digest": bound_to, "kept": kept, "choice": choice}))
    return kept, choice


@torch.no_grad()
def _choose(
    parent: PreTrainedModel, training: Int[Tensor, "windows tokens"], settings: PairSettings, keep: int, say: OnStage
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The layers that stay, and how they were chosen: by influence, the last few of them by what they really cost."""
    say("measuring the influence of layers")
    sample = _spread(training, max(1, settings.measured // settings.window))
    total: list[float] = []
    for window in sample:
        with watched_states(parent) as states:
            parent.base_model(input_ids=window[None], use_cache=False)
        # The first token's states are those of no other: large, and the same whatever the text.
        found = block_influence([state[0, 1:] for state in states])
        total = list(found) if not total else [a + b for a, b in zip(total, found, strict=True)]
    influence = [value / len(sample) for value in total]
    drop = len(influence) - keep
    least = max(FIRST + LAST, keep - math.ceil(settings.reconsidered * drop))
    dropped = set(range(len(influence))) - set(choose_layers(influence, least))
    tried = _spread(training, max(1, settings.tried // settings.window))
    taught = torch.cat([parent.base_model(input_ids=ids[None], use_cache=False).last_hidden_state for ids in tried])

    def cost_of(without: tuple[int, ...]) -> float:
        say(f"trying to do without layers {' '.join(map(str, without))}")
        with without_layers(parent, without):
            return divergence(parent, tried, taught)

    gone, cost = restore_layers(dropped, drop, cost_of)
    kept = tuple(index for index in range(len(influence)) if index not in gone)
    return kept, {"influence": influence, "considered": sorted(dropped), "kl": cost if math.isfinite(cost) else None}


def _plain(name: str) -> str:
    """A model's name as a part of a file's."""
    last = Path(name).name or "model"
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in last)
