"""Free runs: the same prompts decoded with the cache ON and OFF. Do users see different text?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.finding import Finding, Json, Measure, place_of, rate
from kvferry.audit.generate import first_split, generate
from kvferry.audit.pair import Record, number
from kvferry.audit.passages import Passage, final_answer
from kvferry.audit.sample import SAMPLERS, Sampler
from kvferry.audit.study import Study
from kvferry.audit.verdict import worst
from kvferry.errors import InvalidInput
from kvferry.evidence.statistics import bootstrap_mean, mcnemar
from kvferry.evidence.survival import kaplan_meier


def free_run(study: Study) -> list[Finding]:
    """One finding a sampler."""
    found = []
    for name in study.settings.samplers:
        if name not in SAMPLERS:
            raise InvalidInput(f"unknown sampler {name!r}: {', '.join(SAMPLERS)} are")
        found.append(_one(study, CACHE_OFF, CACHE_ON, SAMPLERS[name]))
    return found


def decode_both(study: Study, reference: Arm, other: Arm, sampler: Sampler, passage: Passage) -> Record:
    """Both arms' tokens after one prompt, where they part and the margins there."""
    settings = study.settings

    def make() -> Record:
        second = generate(
            study.models, other, passage.prompt, settings.new_tokens, sampler, sequence=passage.index, ends=study.ends
        )
        first = generate(
            study.models,
            reference,
            passage.prompt,
            settings.new_tokens,
            sampler,
            sequence=passage.index,
            ends=study.ends,
            until_split_from=[second.tokens] if settings.until_split else None,
        )
        split = first_split(first.tokens, second.tokens)
        whole = not settings.until_split
        at = split if split is not None and split < min(len(first.tokens), len(second.tokens)) else None
        return {
            "reference": first.tokens,
            "other": second.tokens,
            "split": split,
            "margins": None if at is None else [number(first.margins[at]), number(second.margins[at])],
            "answers": [_answer(study, run.tokens) for run in (first, second)] if whole else None,
        }

    more = [sampler.to_json(), settings.seed, settings.new_tokens, settings.until_split, list(study.ends)]
    return study.record("free", (reference, other), passage, more, make)


def _one(study: Study, reference: Arm, other: Arm, sampler: Sampler) -> Finding:
    seeded = Sampler(sampler.name, sampler.temperature, sampler.top_k, sampler.top_p, study.settings.seed)
    records: list[Record] = []
    explained: list[Record] = []
    for passage in study.passages:
        record = decode_both(study, reference, other, seeded, passage)
        records.append(record)
        if len(explained) < study.settings.explain and (record["split"] is not None or passage is study.passages[-1]):
            explained.append(study.pair(reference, other, _up_to_split(passage, record)))
        study.step(f"free_run: {sampler.name}")
    measures, curve = free_measures(study, records)
    verdict = worst([one["verdict"] for one in explained]) if explained else "identical"
    layer, tensor, reasons = None, None, ["no run parted"]
    if explained:
        layer, tensor, shown = place_of(explained, verdict)
        reasons = list(shown["reasons"])
    return Finding(
        protocol="free_run",
        arms=study.described(reference, other),
        verdict=verdict,
        layer=layer,
        tensor=tensor,
        n=len(records),
        measures=measures,
        reasons=tuple(reasons),
        verdicts=dict(Counter(one["verdict"] for one in explained)),
        replicas=sum(one["replicas"] for one in explained),
        detail={"sampler": seeded.to_json(), "survival": curve, "splits": _splits(records)},
    )


def free_measures(study: Study, records: list[Record]) -> tuple[dict[str, Measure], Json]:
    """Rates with their intervals, and the survival curve, of free runs."""
    apart = [record["split"] is not None for record in records]
    lengths = [min(len(record["reference"]), len(record["other"])) for record in records]
    times = [
        length if record["split"] is None else record["split"] for record, length in zip(records, lengths, strict=True)
    ]
    curve = kaplan_meier(times, apart)
    # Each token before the first split is one that could have differed; those behind it say nothing.
    tried = sum(times) + sum(apart)
    found = {
        "prompts_diverging": rate(sum(apart), len(apart), "prompts"),
        "divergence_per_token_at_risk": rate(sum(apart), tried, "tokens"),
        "first_divergence_median": Measure(curve.median(), len(apart), None, "prompts"),
    }
    margins = [
        record["margins"][0] for record in records if record["margins"] is not None and record["margins"][0] is not None
    ]
    if margins:
        found["margin_at_divergence_median"] = Measure(float(np.median(margins)), len(margins), None, "prompts")
    return found | _answer_measures(study, records), curve.to_json()


def _answer_measures(study: Study, records: list[Record]) -> dict[str, Measure]:
    """Accuracies, exact McNemar, and the paired bootstrap of their difference; nothing without answers."""
    pairs = [
        (record["answers"], passage.answer)
        for record, passage in zip(records, study.passages, strict=True)
        if record["answers"] is not None and passage.answer is not None
    ]
    if not pairs or study.read is None:
        return {}
    right = [(first == want, second == want) for (first, second), want in pairs]
    off, on = sum(a for a, _ in right), sum(b for _, b in right)
    settings = study.settings
    interval = bootstrap_mean([float(b) - float(a) for a, b in right], resamples=settings.resamples, seed=settings.seed)
    changed = sum(first != second for (first, second), _ in pairs)
    p = mcnemar(sum(a and not b for a, b in right), sum(b and not a for a, b in right))
    return {
        "accuracy_reference": rate(off, len(pairs), "prompts"),
        "accuracy_other": rate(on, len(pairs), "prompts"),
        "accuracy_difference": Measure((on - off) / len(pairs), len(pairs), interval, "prompts"),
        "accuracy_mcnemar_p": Measure(p, len(pairs), None, "prompts"),
        "answers_differing": rate(changed, len(pairs), "prompts"),
    }


def _answer(study: Study, tokens: list[int]) -> str | None:
    return None if study.read is None else final_answer(study.read(tokens))


def _up_to_split(passage: Passage, record: Record) -> Passage:
    """The prompt and the tokens that both runs share, up to the step at which they part."""
    shared = record["reference"][: record["split"]] or record["reference"][:1]
    more = torch.tensor([shared], dtype=torch.int64)
    # The prompt's last token is fed again on the cache: its logits chose the first new token.
    return Passage(passage.index, torch.cat([passage.prompt, more], dim=1), passage.start - 1)


def _splits(records: list[Record]) -> list[Json]:
    return [{"split": record["split"], "margins": record["margins"]} for record in records]
