"""Needle in a haystack: a five-digit number hidden in a long text, read back from the shipped cache."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import BudgetTooSmall, InvalidInput
from kvferry.evaluate.method import Method, ship
from kvferry.evidence.statistics import Interval, bootstrap_mean, wilson
from kvferry.hf.capture import capture
from kvferry.hf.decode import teacher_forced_logits
from kvferry.hf.observe import QUERY_WINDOW
from kvferry.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLACES = (
    "Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Tallinn", "Lima", "Dakar", "Sofia", "Perth",
    "Kyoto", "Bergen", "Tunis", "Riga", "Cusco", "Accra", "Bern", "Split", "Turin", "Omaha",
)  # fmt: skip
_SUBJECTS = (
    "the gardener", "an old clock", "the river", "a quiet neighbor", "the baker", "the evening train", "a painter",
    "the small library", "the ferry", "a young doctor", "the lighthouse", "the orchestra",
)  # fmt: skip
_VERBS = (
    "waited beside", "looked past", "remembered", "drew a map of", "wrote about", "walked around", "described",
    "turned toward", "listened to", "repaired", "kept away from", "followed",
)  # fmt: skip
_OBJECTS = (
    "the wooden bridge", "a field of barley", "the market square", "an empty harbor", "the stone wall", "the orchard",
    "a row of poplars", "the narrow street", "the museum", "a distant hill", "the town hall", "the winter garden",
)  # fmt: skip
_ENDINGS = (
    "until the rain stopped", "before anyone woke", "as the light faded", "without saying a word",
    "for most of the day", "while the kettle boiled", "in the cold morning air", "long after the music ended",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NeedleGrid:
    """Which trials: every length with every depth and every needle.

    Attributes:
        lengths: tokens of the whole prompt.
        depths: where the needle lies in the haystack, 0 at its start, 1 at its end.
        needles: different numbers, each with a haystack of its own.
        question_cached: whether the question is part of the shipped cache, as where a whole prompt is prefilled, or is
            fed to the receiver after it, as where one cache serves any question.
        seed: of numbers and haystacks.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = tuple(place / 8 for place in range(9))
    needles: int = 3
    question_cached: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.needles < 1:
            raise InvalidInput("a needle grid needs at least one length, one depth and one needle")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise InvalidInput(f"depths {self.depths}: each lies between 0 and 1")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One prompt and its answer.

    Attributes:
        length: as asked for.
        depth: as asked for.
        needle: which number.
        token_ids: int64 ``(1, seq_len)``, the prompt.
        cached: how many of its tokens are shipped.
        answer: tokens of the number.
    """

    length: int
    depth: float
    needle: int
    token_ids: Int[Tensor, "1 seq_len"]
    cached: int
    answer: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Of the tokens and of how many are shipped."""
        state = xxhash.xxh3_128(f"{self.cached} {self.answer} ".encode())
        state.update(self.token_ids.numpy().tobytes())
        return state.hexdigest()


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What came of one trial.

    Attributes:
        hit: the whole number was read back, greedily.
        first: its first token, the first digit or more, was.
        nbytes: bytes on the wire.
        full_bytes: those of the 16-bit packet.
        reason: why nothing was shipped.
    """

    hit: bool
    first: bool
    nbytes: int = 0
    full_bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NeedleScore:
    """A method on a grid.

    Attributes:
        n: trials.
        hits: numbers read back.
        ci: Wilson's 95% interval of the rate.
        ci_clustered: a bootstrap's that draws whole (needle, depth) pairs; trials that differ in length only are alike.
            It is a point where all trials agree: then look at ``ci``.
        first_hits: first tokens read back.
    """

    n: int
    hits: int
    ci: Interval
    ci_clustered: Interval | None
    first_hits: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_trials(tokenizer: Any, grid: NeedleGrid, text: str | None = None) -> list[Trial]:
    """The trials of a grid, in haystacks cut from ``text`` or, without one, of generated sentences.

    Raises:
        InvalidInput: a length too short for needle and question, or a text too short for a length.
    """
    lead = list(tokenizer("").input_ids)
    trials = []
    for needle in range(grid.needles):
        rng = random.Random(f"{grid.seed} {needle}")
        place = _PLACES[rng.randrange(len(_PLACES))]
        number = str(rng.randrange(10_000, 100_000))
        sentence = _tokens(tokenizer, f"\nThe secret number of {place} is {number}.\n")
        question = f"\nThe secret number of {place} is"
        asked = _tokens(tokenizer, question)
        complete = _tokens(tokenizer, f"{question} {number}.")
        if complete[: len(asked)] != asked:
            raise InvalidInput("this tokenizer joins question and answer: needles cannot be asked for with it")
        answer = tuple(complete[len(asked) : -1])
        while answer and not tokenizer.decode(answer[:1]).strip():  # a space of its own: no part of the number
            asked, answer = [*asked, answer[0]], answer[1:]
        fixed = len(lead) + len(sentence) + len(asked)
        most = max(grid.lengths) - fixed
        hay = _haystack(tokenizer, rng, most, text)
        for length in grid.lengths:
            room = length - fixed
            if room < 16:
                raise InvalidInput(f"a length of {length} tokens: needle and question alone take {fixed}")
            for depth in grid.depths:
                at = round(depth * room)
                ids = [*lead, *hay[:at], *sentence, *hay[at:room], *asked]
                cached = len(ids) - 1 if grid.question_cached else len(ids) - len(asked)
                trials.append(Trial(length, depth, needle, torch.tensor([ids]), cached, answer))
    return trials


class PreparedTrial:
    """A trial whose prompt is prefilled once; every method ships that same cache."""

    def __init__(self, model: PreTrainedModel, trial: Trial):
        self.model, self.trial = model, trial
        self.snapshot = capture(model, trial.token_ids[:, : trial.cached], query_window=QUERY_WINDOW)

    def judge(self, method: Method) -> TrialResult:
        """Ship by ``method``, then read the number."""
        try:
            shipped = ship(self.snapshot, method)
        except BudgetTooSmall as error:
            return TrialResult(False, False, reason=str(error))
        hit, first = self.read(shipped.snapshot)
        return TrialResult(hit, first, shipped.nbytes, shipped.full_bytes)

    def read(self, snapshot: Snapshot) -> tuple[bool, bool]:
        """Whether greedy decoding gives the number, and its first token.

        The rest of the prompt and the number are fed in one pass: greedy decoding gives the number exactly if each of
        its tokens is the most likely one after the right ones before it.
        """
        answer = torch.tensor([self.trial.answer])
        ids = torch.cat([self.trial.token_ids, answer], dim=1)[:, :-1]
        logits = teacher_forced_logits(self.model, snapshot, ids)[0, -len(self.trial.answer) :]
        right = (logits.argmax(dim=-1).cpu() == answer[0]) & logits.isfinite().all(dim=-1).cpu()
        return bool(right.all()), bool(right[0])


def judge_trials(
    model: PreTrainedModel, trials: Sequence[Trial], methods: Sequence[Method]
) -> Iterator[tuple[Trial, list[TrialResult]]]:
    """Every method on every trial, one prefill a trial."""
    for trial in trials:
        prepared = PreparedTrial(model, trial)
        yield trial, [prepared.judge(method) for method in methods]


def needle_score(trials: Sequence[Trial], results: Sequence[TrialResult], *, seed: int = 0) -> NeedleScore:
    """Summary of one method; ``results[i]`` is of ``trials[i]``."""
    hits = [float(result.hit) for result in results]
    clusters = [(trial.needle, trial.depth) for trial in trials]
    return NeedleScore(
        n=len(hits),
        hits=round(sum(hits)),
        ci=wilson(round(sum(hits)), len(hits)),
        ci_clustered=bootstrap_mean(hits, clusters, seed=seed),
        first_hits=sum(result.first for result in results),
    )


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _haystack(tokenizer: Any, rng: random.Random, count: int, text: str | None) -> list[int]:
    """``count`` tokens of sentences that hold no number; from a text, a stretch of it that starts at random."""
    if count < 1:
        return []
    if text is None:
        sentences: list[str] = []
        while len(sentences) < count // 8 + 4:  # a sentence has over a dozen tokens
            words = " ".join(rng.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
            sentences.append(words[0].upper() + words[1:] + ".")
        ids = _tokens(tokenizer, " ".join(sentences))
    else:
        ids = _tokens(tokenizer, text)
        start = rng.randrange(max(1, len(ids) - count + 1))
        ids = ids[start : start + count]
    if len(ids) < count:
        raise InvalidInput(f"the text has {len(ids)} tokens, the haystack needs {count}")
    return ids[:count]
