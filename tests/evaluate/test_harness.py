"""lm-evaluation-harness on shipped and mapped caches: its own tasks, run by its own evaluator, offline."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import kvferry as kv
from kvferry.cli.main import run
from kvferry.errors import IncompatibleIdentity, InvalidInput
from kvferry.evaluate.harness import register
from kvferry.evaluate.harness_model import KVFerryLM
from kvferry.evaluate.map_tasks import answer, read_choices
from kvferry.evaluate.method import Method, ship
from kvferry.map.mapper import Mapper
from tests.cli.models import TEXT
from tests.map import builders

ENDS = ["moves to the other model.", "is lost", "stays where it is for a while longer.", "x"]
CHOICES = """task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: "{{endings}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_bytes}]
"""
GENERATION = """task: local_generation
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{ctx}}"
doc_to_target: "{{endings[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A source and a target on disk."""
    folder = tmp_path_factory.mktemp("harness")
    builders.saved_pair(folder)
    return str(folder / "source"), str(folder / "target")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two tasks and their questions."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"ctx": TEXT[place : place + 70].strip(), "endings": ENDS, "label": place % 4} for place in range(0, 36, 3)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, words in (("choices", CHOICES), ("generation", GENERATION)):
        (folder / f"{name}.yaml").write_text(words.replace("FILE", str(folder / "questions.jsonl")))
    return folder


def model(folders: tuple[str, str], **given: Any) -> KVFerryLM:
    return KVFerryLM(**{"pretrained": folders[0], "dtype": "float32", **given})


def asked(kind: Any, *arguments: Any) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=place) for place, one in enumerate(arguments)]


def whole(lm: KVFerryLM, context: str, end: str) -> tuple[float, bool]:
    """Without any cache."""
    ids = torch.tensor([lm.tok_encode(context + end)])
    start = len(lm.tok_encode(context))
    loaded, _ = kv.load_model(lm.tokenizer.name_or_path, dtype="float32")
    with torch.no_grad():
        told = torch.log_softmax(loaded(input_ids=ids).logits[0, start - 1 : -1].float(), dim=-1)
    chosen = told.gather(1, ids[0, start:, None]).sum()
    return float(chosen), bool((told.argmax(dim=-1) == ids[0, start:]).all())


def test_a_bit_exact_cache_scores_as_none_does(folders: tuple[str, str]) -> None:
    lm = model(folders)
    pairs = [(TEXT[:60], end) for end in ENDS] + [(TEXT[:5], "b"), ("A", " key-value")]
    for got, pair in zip(lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True), pairs, strict=True):
        score, greedy = whole(lm, *pair)
        assert got == (pytest.approx(score, abs=1e-3), greedy)
    toll = lm.get_model_info()["kvferry"]
    assert (toll["caches"], toll["tokens"]) == (2, 59 + 4)  # the four ends share one; one token has no cache
    assert (toll["actual_budget"], toll["over_budget"]) == (1.0, 0)


def test_a_budget_is_met_and_short_contexts_are_counted(folders: tuple[str, str]) -> None:
    lm, exact = model(folders, budget=0.3), model(folders)
    long = TEXT * 4
    (shipped,), (own,) = (
        one.loglikelihood(asked("loglikelihood", (long, " and on")), disable_tqdm=True) for one in (lm, exact)
    )
    assert shipped != own
    assert shipped[0] == pytest.approx(own[0], abs=0.2)
    toll = lm.get_model_info()["kvferry"]
    assert toll["over_budget"] == 0
    assert toll["actual_budget"] <= 0.3
    assert lm.loglikelihood(asked("loglikelihood", ("A key", " and on")), disable_tqdm=True)
    toll = lm.get_model_info()["kvferry"]
    assert (toll["over_budget"], toll["caches"]) == (1, 2)


def test_a_text_is_scored_whole_or_in_windows(folders: tuple[str, str]) -> None:
    lm = model(folders)
    lm.tokenizer.bos_token_id = 1
    words, ids = TEXT[:80], lm.tok_encode(TEXT[:80])
    (got,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (words,)), disable_tqdm=True)
    loaded, _ = kv.load_model(folders[0], dtype="float32")
    with torch.no_grad():
        told = torch.log_softmax(loaded(input_ids=torch.tensor([[1, *ids]])).logits[0, :-1].float(), dim=-1)
    assert got == pytest.approx(float(told.gather(1, torch.tensor(ids)[:, None]).sum()), abs=1e-3)
    assert lm.get_model_info()["kvferry"]["tokens"] == 40  # the first and half of the text, all but the last
    short = model(folders, max_length=32)
    short.tokenizer.bos_token_id = 1
    (pieces,) = short.loglikelihood_rolling(asked("loglikelihood_rolling", (words,)), disable_tqdm=True)
    assert math.isfinite(pieces)
    assert pieces != got


def test_text_is_generated_up_to_a_mark(folders: tuple[str, str]) -> None:
    lm = model(folders)
    loaded, tokenizer = kv.load_model(folders[0], dtype="float32")
    ids = tokenizer(TEXT[:50], return_tensors="pt").input_ids
    with torch.no_grad():
        out = loaded.generate(ids, max_new_tokens=12, do_sample=False)
    words = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    settings = {"until": ["never"], "max_gen_toks": 12, "do_sample": False}
    until = {**settings, "until": [words[5]]}
    got = lm.generate_until(asked("generate_until", (TEXT[:50], settings), (TEXT[:50], until)), disable_tqdm=True)
    assert got == [words, words[: words.index(words[5])]]
    with pytest.raises(InvalidInput, match="samples"):
        lm.generate_until(asked("generate_until", ("A key", {"do_sample": True, "temperature": 1.0})))


def test_its_evaluator_agrees_with_ours(folders: tuple[str, str], tasks: Path) -> None:
    register()
    register()
    found = simple_evaluate(
        model="kvferry",
        model_args=f"pretrained={folders[0]},dtype=float32,codec=uniform_int8",
        tasks=["local_choices", "local_generation"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    loaded, tokenizer = kv.load_model(folders[0], dtype="float32")
    hits = []
    for question in read_choices(tasks / "questions.jsonl", tokenizer, 12):
        cache = kv.capture(loaded, question.context[:, :-1], query_window=32)
        hits.append(answer(loaded, ship(cache, Method("uniform_int8")).snapshot, question) == question.label)
    assert found["results"]["local_choices"]["acc_bytes,none"] == pytest.approx(sum(hits) / len(hits))
    assert 0 <= found["results"]["local_generation"]["exact_match,none"] <= 1
    told = found["config"]["kvferry"]
    assert (told["method"]["policy"], told["caches"]) == ("uniform_int8", 24)
    assert 0.2 < told["actual_budget"] < 0.4


def test_a_mapped_cache_is_what_the_target_goes_on_from(
    folders: tuple[str, str], trio: tuple[Any, Any, Any, Mapper], tmp_path: Path
) -> None:
    trio[3].save_pretrained(tmp_path / "mapper")
    given = {"mapper": str(tmp_path / "mapper"), "source": folders[0], "pretrained": folders[1]}
    pair = asked("loglikelihood", (TEXT[:60], " moves"))
    all_native, mapped, own = (
        one.loglikelihood(pair, disable_tqdm=True)[0]
        for one in (
            model(folders, **given, native_prefix=1_000),
            model(folders, **given, native_prefix=1, codec="uniform_int8"),
            model(folders, pretrained=folders[1]),
        )
    )
    assert all_native[0] == pytest.approx(own[0], abs=1e-4)
    assert mapped[0] != own[0]
    with pytest.raises(IncompatibleIdentity):
        model(folders, **{**given, "pretrained": folders[0]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"codec": "zip"}, "unknown policy 'zip'; there are auto"),
        ({"codec": "greedy"}, "needs budgets"),
        ({"budget": 0.5, "nominal_budget": 0.5}, "not both"),
        ({"bugdet": 0.5}, "no bugdet"),
        ({"source": "x"}, "for a mapper"),
        ({"native_prefix": 4}, "for a mapper"),
    ],
)
def test_what_is_wrong_is_said(folders: tuple[str, str], given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        model(folders, **given)


def test_the_command_line_is_the_harness(
    folders: tuple[str, str], tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = f"pretrained={folders[0]},dtype=float32,budget=0.9"
    arguments = ["lm-eval", "run", "--model", "kvferry", "--tasks", "local_choices", "--include_path", str(tasks)]
    rest = ["--model_args", given, "--output_path", str(tmp_path / "out"), "--limit", "4"]
    assert run([*arguments, *rest]) == 0
    assert "local_choices" in capfd.readouterr().out
    (path,) = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(path.read_text())
    assert content["n-samples"]["local_choices"] == {"original": 12, "effective": 4}
    assert content["config"]["kvferry"]["caches"] == 4
    assert run([*arguments, "--model_args", "pretrained=/nowhere"]) == 1
    assert "kvferry: " in capfd.readouterr().err.splitlines()[-1]
    assert run(["lm-eval", "run", "--no-such-option"]) == 2
    assert sys.argv[0] != "kvferry lm-eval"
