"""Training the variants of a map that moments alone do not determine: both models run, a sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from kvferry.errors import InvalidInput
from kvferry.evaluate.map_fit import Collected, is_held, with_tokenizer
from kvferry.evaluate.map_learn import Errors, OnStep, learn
from kvferry.evidence.log import digest
from kvferry.hf.capture import capture
from kvferry.map.mapper import Mapper
from kvferry.map.train import VARIANTS, Trainer, TrainSettings
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train(
    source: PreTrainedModel,
    target: PreTrainedModel,
    run: Collected,
    mapper: Mapper,
    *,
    settings: TrainSettings | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
) -> Mapper:
    """The mapper of ``mapper``'s recipe, from its linear beginning.

    The text is gone through once an epoch, and the models run anew each time: nothing is stored. What is kept is what
    does best on the sequences held out, or the beginning where nothing does better (``epoch_kept`` 0); training ends
    early where several measurements bring nothing better. All measurements go into the record.

    Args:
        source, target: the models.
        run: the moments, and the sequences.
        mapper: the linear one of the same recipe.
        settings: by default `VARIANTS` of the recipe's variant.
        seed: of the first weights and the order.
        resume: folder where the training is kept while it runs; one that was killed goes on from there.
        on_step: told ``(done, in all, at what)``.

    Raises:
        InvalidInput: several ranks, which would each learn something else.
        CorruptPacket: a damaged checkpoint.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InvalidInput(f"variant {mapper.recipe.variant} is trained in one process; fit 'ridge' on several")
    wanted = settings or VARIANTS[mapper.recipe.variant]
    trainer = Trainer(mapper, run.calibration, wanted, seed)
    fit = _some([ids for index, ids in enumerate(run.sequences) if not is_held(index)], wanted.sequences)
    held = _some([ids for index, ids in enumerate(run.sequences) if is_held(index)], wanted.held)
    name = digest(
        {
            "fit": [run.text_digest, run.calibration.digest, len(run.sequences)],
            "recipe": asdict(mapper.recipe),
            "sources": [[part.target.to_json(), [b.to_json() for b in part.sources]] for part in mapper.parts],
            "settings": asdict(wanted),
            "seed": seed,
        }
    )
    descend, errors_of = _loss(source, target, trainer)

    def measure() -> tuple[Errors, dict[str, list[float]]]:
        trainer.forget()
        found = [errors_of(ids) for ids in held]
        return {key: sum(one[key] for one in found) / len(found) for key in found[0]}, trainer.r2()

    checkpoint = None if resume is None else Path(resume) / f"{mapper.recipe.variant}-{name[:12]}.safetensors"
    judge = "loss" if wanted.on_target else "attention" if wanted.on_attention else "rows"
    course = learn(
        trainer.weights,
        descend,
        measure,
        fit,
        wanted,
        judge=judge,
        checkpoint=checkpoint,
        bound_to=name,
        seed=seed,
        on_step=on_step,
    )
    before, best = course.at(0), course.at(course.best)
    record: dict[str, Any] = {
        "epochs": wanted.epochs,
        "epoch_kept": round(course.best / len(fit), 3),
        "epochs_done": round(course.step / len(fit), 3),
        "stopped_early": course.step < course.steps,
        "steps": course.step,
        "settings": asdict(wanted),
        "judged_by": judge,
        "held_errors": [{"step": look["step"], **look["errors"]} for look in course.looks],
        "train_seconds": round(course.seconds, 3),
        **{f"held_{key}_error_before": round(value, 6) for key, value in before["errors"].items()},
        **{f"held_{key}_error": round(value, 6) for key, value in best["errors"].items()},
    }
    made = trainer.finish(record, best["r2"])
    whole = round(float(made.made.get("fit_seconds", 0.0)) + course.seconds, 3)
    return replace(made, made={**made.made, "fit_seconds": whole})


def _some(sequences: list[Tensor], most: int | None) -> list[Tensor]:
    """Up to ``most`` of them, from all over."""
    count = len(sequences) if most is None else min(most, len(sequences))
    return [sequences[place * len(sequences) // count] for place in range(count)]


def _loss(
    source: PreTrainedModel, target: PreTrainedModel, trainer: Trainer
) -> tuple[Callable[[Tensor, int], float], Callable[[Tensor], Errors]]:
    """What leaves a sequence's gradients at the weights, and what measures the errors on one."""
    settings, mapper = trainer.settings, trainer.mapper
    if settings.on_target:
        from kvferry.evaluate.map_e2e import EndToEnd

        whole = EndToEnd(source, target, trainer)
        return whole.descend, whole.measure

    def caches(ids: Tensor) -> tuple[Snapshot, Snapshot]:
        window = settings.queries if settings.on_attention else 0
        return (
            with_tokenizer(capture(source, ids), mapper.source),
            with_tokenizer(capture(target, ids, query_window=window), mapper.target),
        )

    def descend(ids: Tensor, step: int) -> float:
        errors = trainer.step(*caches(ids), offset=step)
        return errors["attention" if settings.on_attention else "rows"]

    return descend, lambda ids: trainer.step(*caches(ids), learn=False)
