"""Fitting a mapper: both models run over a text, moments are added up, and the map is solved from them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from kvferry.errors import InvalidInput
from kvferry.hf.capture import capture
from kvferry.hf.identity import identity_of
from kvferry.hf.models import loaded_as
from kvferry.hf.rotary import rotaries_of
from kvferry.map.calibration import Calibration
from kvferry.map.fit import LINEAR, fit_linear
from kvferry.map.mapper import VARIANTS, Mapper, Recipe
from kvferry.map.train import TrainSettings
from kvferry.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELD_EVERY = 5
"""One sequence of so many is held out."""

GROUP = 8
"""Sequences whose rows are multiplied together."""

OnStep = Callable[[int, int, str], None]
"""Told ``(done, in all, at what)``."""

Through = Callable[[Snapshot], Snapshot]


@dataclass(frozen=True, slots=True)
class FitSettings:
    """What a fit takes in.

    Attributes:
        sequences: of the text, at most; fewer where it is short.
        length: tokens of each.
        stride: every so many-th token is taken, as in the paper.
        reach: how far apart in depth a source layer may lie, as a share of the whole.
        checkpoint_seconds: how often the moments go to disk, where a folder is given.
    """

    sequences: int = 160
    length: int = 1024
    stride: int = 4
    reach: float = 1.0
    checkpoint_seconds: float = 60.0


def fit(
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Sequence[str],
    *,
    top_k: int | None = 4,
    variant: str = "ridge",
    ridge: float = 0.01,
    sources: str = "same",
    native_prefix: int = 4,
    strip: bool = True,
    reapply: bool = True,
    tokenizer: Any = None,
    settings: FitSettings | None = None,
    resume: str | Path | None = None,
    group: Any = None,
    through: Through | None = None,
    training: TrainSettings | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Mapper:
    """A mapper of ``source``'s caches to ``target``'s.

    Both models run over each sequence once. Their caches live only until their moments are added, so memory does not
    grow with the text. Where `torch.distributed` is initialised, each rank takes its share of the sequences and all
    end with the same mapper.

    Args:
        source, target: a matched-KV pair, from `load_model`, each in the dtype that its caches will have.
        texts: what the caches are of; the more, and the more like what will be mapped, the better.
        top_k: source layers a target layer; ``None``: all.
        variant: ``ridge``, ``head_local`` (one source layer a head), ``ridge+residual``, ``mlp``, or, trained through
            the target by what comes out of it, ``ridge+e2e`` (linear) and ``residual+e2e`` (with a hidden layer).
        ridge: λ, on moments that are sums over tokens.
        sources: ``same`` (keys from keys, values from values, as in the paper) or ``both`` (each from both).
        native_prefix: first tokens of a context that the target will prefill itself; the fit leaves them out.
        strip: take the source's rotary positions off its keys first; without, an ablation.
        reapply: put the target's on at the end; without, an ablation.
        tokenizer: the pair's; by default the one that the source was loaded with.
        settings: sizes.
        resume: folder where moments and training are kept while the fit runs; one that was killed goes on from there.
        group: process group of `torch.distributed`; by default the whole world, where there is one.
        through: what the source's caches go through before they are mapped, where that is not nothing: a codec, say, as
            in ``lambda snapshot: decode(encode(snapshot, 0.28))``. Not for the trained variants.
        training: of the trained variants; by default `kvferry.map.train.VARIANTS`.
        seed: of the trained variants' first weights and the order of their text.
        on_step: told ``(done, in all, at what)``.

    Raises:
        IncompatibleIdentity: no matched-KV pair, with every reason; or ``resume`` holds another fit.
        InvalidInput: too short a text, or an unknown variant.
        UnsupportedCache: a rotary embedding or cache that cannot be mapped.
    """
    require_variant(variant)
    if through is not None and variant not in LINEAR:
        raise InvalidInput(f"variant {variant} is trained on caches as they are: leave 'through' out, or fit ridge")
    recipe = Recipe(variant, top_k, ridge, sources, strip, reapply, native_prefix)
    run = collect(
        source,
        target,
        texts,
        recipe,
        tokenizer=tokenizer,
        settings=settings,
        resume=resume,
        group=group,
        through=through,
        on_step=on_step,
    )
    return finish(source, target, run, training=training, seed=seed, resume=resume, on_step=on_step)


def require_variant(variant: str) -> None:
    """Raise `InvalidInput` for a variant that cannot be fitted."""
    if variant not in VARIANTS:
        raise InvalidInput(f"unknown variant {variant!r}: {', '.join(VARIANTS)} are")


def choose_best(run: Collected, rows: Sequence[Mapping[str, Any]]) -> None:
    """Set the number of source layers and λ of the recipe to the best row of `kvferry.map.fit.r2_table`: by the mean of
    keys' and values' R² on the tokens held out."""
    best = max(rows, key=lambda row: float(row["keys"]) + float(row["values"]))
    run.calibration.recipe = replace(run.calibration.recipe, top_k=best["top_k"], ridge=best["ridge"])


def finish(
    source: PreTrainedModel,
    target: PreTrainedModel,
    run: Collected,
    *,
    training: TrainSettings | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
) -> Mapper:
    """The second half of `fit`: the mapper of the recipe that the moments were collected for. Arguments as there."""
    mapper = solve(run, on_step=on_step)
    if mapper.recipe.variant in LINEAR:
        return mapper
    from kvferry.evaluate.map_train import train

    return train(source, target, run, mapper, settings=training, seed=seed, resume=resume, on_step=on_step)


@dataclass(slots=True, eq=False)
class Collected:
    """What `collect` gives.

    Attributes:
        calibration: the moments.
        sequences: token ids, each ``(1, length)``.
        text_digest: SHA-256 of them.
        model_seconds: time that the two models ran, earlier runs that were gone on from included.
        seconds: whole time, without loading the models; likewise.
        earlier: seconds of those earlier runs.
    """

    calibration: Calibration
    sequences: list[Tensor]
    text_digest: str
    model_seconds: float
    seconds: float
    earlier: float = 0.0

    def made(self) -> dict[str, Any]:
        """For the mapper's record."""
        return {
            "sequences": len(self.sequences),
            "length": int(self.sequences[0].shape[1]),
            "calibration": self.text_digest,
            "model_seconds": round(self.model_seconds, 3),
            "fit_seconds": round(self.seconds, 3),
        }


def collect(
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Sequence[str],
    recipe: Recipe,
    *,
    tokenizer: Any = None,
    settings: FitSettings | None = None,
    resume: str | Path | None = None,
    group: Any = None,
    through: Through | None = None,
    on_step: OnStep | None = None,
) -> Collected:
    """The first half of `fit`: moments of both models' caches over a text. Arguments and errors as there."""
    if resume is not None and through is not None:
        raise InvalidInput("moments of caches that went through a codec are not kept on disk: fit without resume")
    wanted = settings or FitSettings()
    used = tokenizer if tokenizer is not None else _tokenizer_of(source)
    sequences = cut_sequences(used, texts, wanted.length, wanted.sequences)
    digest = _digest(sequences)
    calibration = start_calibration(source, target, recipe, tokenizer=tokenizer, settings=wanted)
    rank, world = _place(group)
    folder = None if resume is None else Path(resume) / f"rank-{rank}-of-{world}"
    done = 0 if folder is None else calibration.load(folder, digest)
    began = saved = time.perf_counter()
    spent = calibration.spent
    before = spent["whole"]

    def elapsed() -> float:
        return before + time.perf_counter() - began

    if not done:
        calibration.centre(*_both(calibration, source, target, sequences[0]))
    # Groups of sequences are multiplied together, and a group is one rank's: the products are the same, bit for bit,
    # for any number of ranks and interruptions.
    groups = [range(start, min(start + GROUP, len(sequences))) for start in range(0, len(sequences), GROUP)]
    mine = [index for group_ in groups[rank::world] for index in group_]
    for place, index in enumerate(mine):
        if place < done:
            continue
        if on_step is not None:
            on_step(place, len(mine), "sequences")
        spent["models"] += add_sequence(calibration, source, target, sequences[index], index, through)
        if (index + 1) % GROUP == 0:
            calibration.flush()
            if folder is not None and time.perf_counter() - saved >= wanted.checkpoint_seconds:
                spent["whole"] = elapsed()
                calibration.save(folder, place + 1, digest)
                saved = time.perf_counter()
    calibration.flush()
    spent["whole"] = elapsed()
    if folder is not None and len(mine) > done:
        calibration.save(folder, len(mine), digest)
    if world > 1:
        calibration.all_reduce(group)
    return Collected(calibration, sequences, digest, spent["models"], elapsed(), before)


def start_calibration(
    source: PreTrainedModel,
    target: PreTrainedModel,
    recipe: Recipe,
    *,
    tokenizer: Any = None,
    settings: FitSettings | None = None,
) -> Calibration:
    """An empty calibration of two models."""
    wanted = settings or FitSettings()
    identities = [
        identity_of(model, tokenizer if loaded_as(model) is None else None, construction=())
        for model in (source, target)
    ]
    # The pair is judged before anything is asked of the models' rotary modules.
    from kvferry.map.pair import require_pair

    require_pair(*identities)
    rotaries = tuple(
        rotaries_of(model, len(identity.layers)) for model, identity in zip((source, target), identities, strict=True)
    )
    return Calibration(
        identities[0],
        identities[1],
        (rotaries[0], rotaries[1]),
        recipe,
        stride=wanted.stride,
        reach=wanted.reach,
    )


def add_sequence(
    calibration: Calibration,
    source: PreTrainedModel,
    target: PreTrainedModel,
    ids: Tensor,
    index: int,
    through: Through | None = None,
) -> float:
    """Run both models over one sequence and add its moments; returns the seconds that the models took."""
    began = time.perf_counter()
    caches = _both(calibration, source, target, ids)
    ran = time.perf_counter() - began
    if through is not None:
        caches = through(caches[0]), caches[1]
    calibration.add(*caches, held=is_held(index), offset=index)
    return ran


def _both(
    calibration: Calibration, source: PreTrainedModel, target: PreTrainedModel, ids: Tensor
) -> tuple[Snapshot, Snapshot]:
    """Both models' caches of one sequence."""
    first, second = capture(source, ids), capture(target, ids)
    return with_tokenizer(first, calibration.source), with_tokenizer(second, calibration.target)


def with_tokenizer(snapshot: Snapshot, identity: Identity) -> Snapshot:
    """The snapshot of a model whose tokenizer nobody knew when it was taken."""
    if snapshot.identity.tokenizer is not None:
        return snapshot
    return replace(snapshot, identity=replace(snapshot.identity, tokenizer=identity.tokenizer))


def is_held(index: int) -> bool:
    """Whether a sequence is held out."""
    return index % HELD_EVERY == HELD_EVERY - 1


def solve(run: Collected, *, on_step: OnStep | None = None) -> Mapper:
    """The linear mapper of some moments."""
    began = time.perf_counter()

    def on_layer(done: int, total: int) -> None:
        if on_step is not None:
            on_step(done, total, "layers")

    mapper = fit_linear(run.calibration, run.made(), on_layer=on_layer)
    run.seconds += time.perf_counter() - began
    return replace(mapper, made={**mapper.made, "fit_seconds": round(run.seconds, 3)})


def cut_sequences(tokenizer: Any, texts: str | Sequence[str], length: int, count: int) -> list[Tensor]:
    """Disjoint sequences spread over the texts, each led by what the tokenizer puts before one.

    Raises:
        InvalidInput: texts of less than `HELD_EVERY` sequences.
    """
    if length < 8 or count < HELD_EVERY:
        raise InvalidInput(f"{count} sequences of {length} tokens: at least {HELD_EVERY} of 8 are needed")
    lead = torch.tensor([tokenizer("", verbose=False).input_ids], dtype=torch.int64).view(1, -1)
    own = length - lead.shape[1]
    found: list[Tensor] = []
    total = 0
    for text in [texts] if isinstance(texts, str) else texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False).input_ids], dtype=torch.int64)
        total += ids.shape[1]
        found += [ids[:, start : start + own] for start in range(0, ids.shape[1] - own + 1, own)]
    if len(found) < HELD_EVERY:
        raise InvalidInput(
            f"a fit needs at least {HELD_EVERY} sequences of {length} tokens; the text has {total} tokens in all: "
            "give a longer one, or shorter sequences"
        )
    count = min(count, len(found))
    chosen = [found[place * (len(found) - 1) // max(1, count - 1)] for place in range(count)]
    return [torch.cat([lead, ids], dim=1) for ids in chosen]


def _digest(sequences: Sequence[Tensor]) -> str:
    state = hashlib.sha256()
    for ids in sequences:
        state.update(f"{tuple(ids.shape)}".encode())
        state.update(ids.contiguous().numpy().tobytes())
    return state.hexdigest()


def _tokenizer_of(model: PreTrainedModel) -> Any:
    known = loaded_as(model)
    if known is None:
        raise InvalidInput("give the tokenizer of the pair: it is known only for models from load_model")
    return known.tokenizer


def _place(group: Any) -> tuple[int, int]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)
