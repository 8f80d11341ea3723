"""Training the variants of a map that moments alone do not determine: both models run, a sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from kvferry.errors import InvalidInput
from kvferry.evaluate.map_fit import Collected, is_held, with_tokenizer
from kvferry.hf.capture import capture
from kvferry.map.mapper import Mapper
from kvferry.map.train import VARIANTS, Trainer, TrainSettings
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, int, str], None]


def train(
    source: PreTrainedModel,
    target: PreTrainedModel,
    run: Collected,
    mapper: Mapper,
    *,
    settings: TrainSettings | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Mapper:
    """The mapper of ``mapper``'s recipe (``ridge+residual`` or ``mlp``), from its linear beginning.

    The text is gone through once an epoch, and the models run anew each time: nothing is stored. What is kept is the
    epoch that does best on the sequences held out, or the beginning where none does better (``epoch_kept`` 0); the
    errors there, before and after, go into the record.

    Raises:
        InvalidInput: several ranks, which would each learn something else.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InvalidInput(f"variant {mapper.recipe.variant} is trained in one process; fit 'ridge' on several")
    wanted = settings or VARIANTS[mapper.recipe.variant]
    trainer = Trainer(mapper, run.calibration, wanted, seed)
    began = time.perf_counter()
    fit = [ids for index, ids in enumerate(run.sequences) if not is_held(index)]
    held = [ids for index, ids in enumerate(run.sequences) if is_held(index)]
    total = wanted.epochs * len(fit)

    def caches(ids: Tensor) -> tuple[Snapshot, Snapshot]:
        window = wanted.queries if wanted.on_attention else 0
        return (
            with_tokenizer(capture(source, ids), mapper.source),
            with_tokenizer(capture(target, ids, query_window=window), mapper.target),
        )

    def measured() -> dict[str, float]:
        trainer.forget()
        found = [trainer.step(*caches(ids), learn=False) for ids in held]
        return {name: sum(one[name] for one in found) / len(found) for name in found[0]}

    judge = "attention" if wanted.on_attention else "rows"
    before = best = measured()
    kept, chosen, r2 = trainer.weights(), 0, trainer.r2()
    for step in range(total):
        if on_step is not None:
            on_step(step, total, "training")
        trainer.step(*caches(fit[step % len(fit)]))
        if (step + 1) % len(fit) == 0:
            found = measured()
            if found[judge] < best[judge]:
                best, kept, chosen, r2 = found, trainer.weights(), (step + 1) // len(fit), trainer.r2()
    trainer.restore(kept)
    record: dict[str, Any] = {
        "epochs": wanted.epochs,
        "epoch_kept": chosen,
        "hidden": list(wanted.hidden),
        "train_seconds": round(time.perf_counter() - began, 3),
        **{f"held_{name}_error_before": round(value, 6) for name, value in before.items()},
        **{f"held_{name}_error": round(value, 6) for name, value in best.items()},
    }
    return trainer.finish(record, r2)
