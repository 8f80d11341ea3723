"""What audits run on: token sequences out of a text, and questions with answers out of a JSONL file."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.snapshot.files import read_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One sequence.

    Attributes:
        index: which; the noise of sampling hangs on it.
        token_ids: ``(1, length)``.
        start: tokens of the prefix, or of the prompt.
        answer: what a task expects.
    """

    index: int
    token_ids: Int[Tensor, "1 length"]
    start: int
    answer: str | None = None

    @property
    def prompt(self) -> Int[Tensor, "1 start"]:
        return self.token_ids[:, : self.start]


def passages_of_text(tokenizer: Any, text: str, *, n: int, prefix: int, suffix: int) -> list[Passage]:
    """Disjoint passages from all over a text, each with the special tokens that the tokenizer begins texts with.

    Asking for more of them keeps the first ones.

    Raises:
        InvalidInput: a text too short for so many, or numbers that are not positive.
    """
    if min(n, prefix, suffix) < 1:
        raise InvalidInput(f"{n} passages of {prefix} + {suffix} tokens: all three must be at least 1")
    lead = list(tokenizer("").input_ids)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    own = prefix + suffix - len(lead)
    if own < 1 or prefix <= len(lead):
        raise InvalidInput(f"a prefix of {prefix} tokens leaves no room beside {len(lead)} special tokens")
    places = len(ids) // own
    if places < n:
        raise InvalidInput(f"the text has {len(ids)} tokens: enough for {places} passages of {own}, not for {n}")
    step = _coprime(places)
    found = []
    for index in range(n):
        begin = (index * step % places) * own
        found.append(Passage(index, torch.tensor([[*lead, *ids[begin : begin + own]]], dtype=torch.int64), prefix))
    return found


def passages_of_ids(token_ids: Tensor, start: int | None = None) -> list[Passage]:
    """A sequence a row; the prefix is two thirds of it where no ``start`` is given."""
    ids = token_ids.unsqueeze(0) if token_ids.dim() == 1 else token_ids
    if ids.dim() != 2 or ids.shape[1] < 3:
        raise InvalidInput(f"token ids {tuple(token_ids.shape)}: an audit needs rows of at least 3 tokens")
    place = max(1, ids.shape[1] * 2 // 3) if start is None else start
    return [Passage(index, row.unsqueeze(0), place) for index, row in enumerate(ids)]


def passages_of_tasks(
    tokenizer: Any, path: str | Path, n: int | None = None, longest: int | None = None
) -> list[Passage]:
    """Prompts of a file of ``{"question": …, "answer": …}`` lines, such as GSM8K's; the whole passage is the prompt.

    Args:
        tokenizer: of the model.
        path: the file.
        n: take the first so many.
        longest: leave out prompts of more tokens than that.

    Raises:
        InvalidInput: no such file, a line that is none of these, or too few prompts.
    """
    lines = read_text(path).splitlines()
    found: list[Passage] = []
    for number, line in enumerate(lines, 1):
        if n is not None and len(found) >= n:
            break
        try:
            item = json.loads(line)
            question, answer = item["question"], item["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f'{path}, line {number}: no object with "question" and "answer"') from error
        ids = tokenizer(f"Question: {question}\nAnswer:", verbose=False).input_ids
        if longest is None or len(ids) <= longest:
            found.append(Passage(number - 1, torch.tensor([ids], dtype=torch.int64), len(ids), final_answer(answer)))
    if not found:
        raise InvalidInput(f"{path} has no tasks" + ("" if longest is None else f" of at most {longest} tokens"))
    return found


def final_answer(text: str) -> str | None:
    """The number that a solution ends in: behind ``####`` where there is one, else the last one."""
    marked = text.rpartition("####")[2] if "####" in text else text
    numbers = _NUMBER.findall(marked)
    if not numbers:
        return None
    number: str = (numbers[0] if "####" in text else numbers[-1]).replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _coprime(places: int) -> int:
    """A step near the golden section of ``places`` that reaches all of them."""
    step = max(1, round(places * 0.618))
    while math.gcd(step, places) != 1:
        step += 1
    return step
