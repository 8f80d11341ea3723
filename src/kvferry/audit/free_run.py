"""Free runs: the same prompts decoded with the cache ON and OFF. Do users see different text?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.finding import Finding, Json, Measure, place_of, rate
from kvferry.audit.generate import (
    Generated,
    Screened,
    first_split,
    generate,
    generate_until_split,
    recompute_screened,
)
from kvferry.audit.pair import Record, number
from kvferry.audit.passages import Passage, final_answer
from kvferry.audit.sample import SAMPLERS, Sampler
from kvferry.audit.study import Study
from kvferry.audit.verdict import worst
from kvferry.errors import InvalidInput
from kvferry.evidence.statistics import bootstrap_mean, mcnemar, wilson
from kvferry.evidence.survival import kaplan_meier


def free_run(study: Study) -> list[Finding]:
    """One finding a sampler."""
    found = []
    for name in study.settings.samplers:
        if name not in SAMPLERS:
            raise InvalidInput(f"unknown sampler {name!r}: {', '.join(SAMPLERS)} are")
        found.append(_one(study, CACHE_OFF, CACHE_ON, SAMPLERS[name]))
    return found


def decode_both(
    study: Study, reference: Arm, other: Arm, sampler: Sampler, passage: Passage, *, whole: bool = False
) -> Record:
    """Both arms' tokens after one prompt, where they part and the margins there.

    ``whole``: where recomputation is screened, every step of this prompt is recomputed, too.
    """
    settings, ends = study.settings, _ends(study)

    def make() -> Record:
        more: Record = {}
        if settings.screen:
            first, second, more = _screened(study, reference, other, passage, whole=whole)
        elif settings.until_split:
            first, second = generate_until_split(
                study.models,
                (reference, other),
                passage.prompt,
                settings.new_tokens,
                sampler,
                sequence=passage.index,
                ends=ends,
            )
        else:
            first, second = (
                generate(
                    study.models,
                    arm,
                    passage.prompt,
                    settings.new_tokens,
                    sampler,
                    sequence=passage.index,
                    ends=ends,
                )
                for arm in (reference, other)
            )
        split = first_split(first.tokens, second.tokens)
        at = split if split is not None and split < min(len(first.tokens), len(second.tokens)) else None
        return {
            "reference": first.tokens,
            "other": second.tokens,
            "split": split,
            "margins": None if at is None else [number(first.margins[at]), number(second.margins[at])],
            "crossed": None if at is None else _crossed(sampler, first, second),
            "answers": None if settings.until_split else [_answer(study, run.tokens) for run in (first, second)],
            **more,
        }

    asked = [sampler.to_json(), settings.seed, settings.new_tokens, settings.until_split, list(ends)]
    asked += [settings.screen, whole] if settings.screen else []
    return study.record("free", (reference, other), passage, asked, make)


def _screened(
    study: Study, reference: Arm, other: Arm, passage: Passage, *, whole: bool
) -> tuple[Generated | Screened, Generated, Record]:
    """The reference recomputed where it may have chosen otherwise; ``whole``: at every step as well, to compare."""
    settings, prompt, ends = study.settings, passage.prompt, _ends(study)
    second = generate(study.models, other, prompt, settings.new_tokens, ends=ends, keep_logits=True)
    first = recompute_screened(
        study.models,
        reference,
        prompt,
        second,
        settings.new_tokens,
        settings.screen,
        ends=ends,
        until_split=settings.until_split,
    )
    agrees = None
    if whole:
        every = generate(study.models, reference, prompt, len(first.tokens), ends=ends)
        agrees = every.tokens == first.tokens
    return first, second, {"recomputed": first.recomputed, "agrees": agrees}


def _one(study: Study, reference: Arm, other: Arm, sampler: Sampler) -> Finding:
    seeded = Sampler(sampler.name, sampler.temperature, sampler.top_k, sampler.top_p, study.settings.seed)
    records: list[Record] = []
    explained: list[Record] = []
    for passage in study.passages:
        whole = len(records) < study.settings.explain
        record = decode_both(study, reference, other, seeded, passage, whole=whole)
        records.append(record)
        if len(explained) < study.settings.explain and (record["split"] is not None or passage is study.passages[-1]):
            explained.append(study.pair(reference, other, _up_to_split(passage, record)))
        study.step(f"free_run: {sampler.name}")
    measures, curve = free_measures(study, records)
    parted = any(record["split"] is not None for record in records)
    verdict = worst([one["verdict"] for one in explained]) if explained else "rounding" if parted else "identical"
    layer, tensor = None, None
    reasons = [
        "none that parted was explained: that it is no more than rounding is not shown" if parted else "none parted"
    ]
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
        detail={
            "sampler": seeded.to_json(),
            "new_tokens": study.settings.new_tokens,
            "survival": curve,
            "splits": _splits(records),
        },
    )


def free_measures(study: Study, records: list[Record]) -> tuple[dict[str, Measure], Json]:
    """Rates with their intervals, and the survival curve, of free runs."""
    horizon = study.settings.new_tokens
    apart = [record["split"] is not None for record in records]
    lengths = [min(len(record["reference"]), len(record["other"])) for record in records]
    # A pair that has ended together can part no more: it is together up to the horizon, not lost from sight.
    times = [horizon if record["split"] is None else record["split"] for record in records]
    curve = kaplan_meier(times, apart)
    # Each token before the first split is one that could have differed; those behind it say nothing.
    tried = sum(min(time, length) for time, length in zip(times, lengths, strict=True)) + sum(apart)
    ended = sum(length < horizon and not parted for length, parted in zip(lengths, apart, strict=True))
    found = {
        "prompts_diverging": rate(sum(apart), len(apart), "prompts"),
        "prompts_ended_together": rate(ended, len(apart), "prompts"),
        "divergence_per_token_at_risk": rate(sum(apart), tried, "tokens"),
        "first_divergence_median": Measure(curve.median(), len(apart), None, "prompts"),
    }
    margins = [
        record["margins"][0] for record in records if record["margins"] is not None and record["margins"][0] is not None
    ]
    if margins:
        found["margin_at_divergence_median"] = Measure(float(np.median(margins)), len(margins), None, "prompts")
    crossed = [record["crossed"] for record in records if record["crossed"] is not None]
    if crossed:
        found["splits_at_the_edge"] = rate(sum(crossed), len(crossed), "splits")
    found |= _screen_measures(records)
    return found | _answer_measures(study, records), curve.to_json()


def _screen_measures(records: list[Record]) -> dict[str, Measure]:
    """Of screened runs: the share of steps that were recomputed, and of prompts on which it made no difference."""
    screened = [record for record in records if "recomputed" in record]
    if not screened:
        return {}
    steps = sum(len(record["reference"]) for record in screened)
    tried = [record["agrees"] for record in screened if record["agrees"] is not None]
    found = {"steps_recomputed": rate(sum(record["recomputed"] for record in screened), steps, "steps")}
    return found | ({"screening_agrees": rate(sum(tried), len(tried), "prompts")} if tried else {})


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
    if off == on and all(a == b for a, b in right):
        # None of the pairs differs: as many more of them as Wilson allows may, to either side.
        most = wilson(0, len(pairs))[1]
        interval = (-most, most)
    changed = sum(first != second for (first, second), _ in pairs)
    alone = sum(a and not b for a, b in right), sum(b and not a for a, b in right)
    return {
        "accuracy_reference": rate(off, len(pairs), "prompts"),
        "accuracy_other": rate(on, len(pairs), "prompts"),
        "accuracy_difference": Measure((on - off) / len(pairs), len(pairs), interval, "prompts"),
        "right_in_reference_alone": rate(alone[0], len(pairs), "prompts"),
        "right_in_other_alone": rate(alone[1], len(pairs), "prompts"),
        "accuracy_mcnemar_p": Measure(mcnemar(*alone), len(pairs), None, "prompts"),
        "answers_differing": rate(changed, len(pairs), "prompts"),
    }


def _answer(study: Study, tokens: list[int]) -> str | None:
    end = next((place for place, token in enumerate(tokens) if token in study.ends), len(tokens))
    return None if study.read is None else final_answer(study.read(tokens[:end]))


def _ends(study: Study) -> tuple[int, ...]:
    """Tokens that end a run."""
    return () if study.settings.ignore_ends else study.ends


def _crossed(sampler: Sampler, first: Generated | Screened, second: Generated | Screened) -> bool | None:
    """Whether either run's token is not among those that the sampler keeps of the other's last logits: their draws
    then part however far the choice led. ``None`` where the logits of that step were not kept."""
    if not (isinstance(first, Generated) and isinstance(second, Generated) and first.logits and second.logits):
        return None
    pairs = ((first, second), (second, first))
    return not all(sampler.keeps(one.logits[-1], another.tokens[-1]) for one, another in pairs)


def _up_to_split(passage: Passage, record: Record) -> Passage:
    """The prompt and the tokens that both runs share, up to the step at which they part."""
    shared = record["reference"][: record["split"]] or record["reference"][:1]
    more = torch.tensor([shared], dtype=torch.int64)
    # The prompt's last token is fed again on the cache: its logits chose the first new token.
    return Passage(passage.index, torch.cat([passage.prompt, more], dim=1), passage.start - 1)


def _splits(records: list[Record]) -> list[Json]:
    return [{name: record[name] for name in ("split", "margins", "crossed")} for record in records]
