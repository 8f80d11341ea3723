"""Children of models: which layers stay, what they are trained on, and folders that are whole or not there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, GPT2Config

from kvferry.errors import CorruptPacket, InvalidInput
from kvferry.hf.distil import _HeadKL, cross_entropy, distillation
from kvferry.hf.made import RECORD, working_folder
from kvferry.hf.models import load_model
from kvferry.hf.pair import PairSettings, make_pair
from kvferry.hf.prune import block_influence, child_of, choose_layers, restore_layers, watched_states, without_layers
from kvferry.hf.tiny_pair import make_tiny_pair
from kvferry.hf.train import Adam, Progress, TrainSettings, _batches, _Clock, train
from kvferry.snapshot.container import write_container
from tests.cli import models
from tests.hf import tiny
from tests.hf.killed_pair import SETTINGS, TEXT


@pytest.fixture(scope="module")
def parent_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save(tiny.llama(num_hidden_layers=8, dtype=torch.bfloat16), tmp_path_factory.mktemp("parent"))


@pytest.fixture
def parent(parent_folder: str) -> tuple[Any, Any]:
    return load_model(parent_folder, dtype="float32")


def idle(model: Any, layers: Sequence[int]) -> None:
    """Layers that hand on what they are given."""
    with torch.no_grad():
        for index in layers:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()


def kl(teacher: Any, student: Any, ids: Tensor) -> float:
    with torch.no_grad():
        want, said = (torch.log_softmax(model(input_ids=ids).logits.double(), -1) for model in (teacher, student))
    return float((want.exp() * (want - said)).sum(-1).mean())


def test_influence_is_how_far_a_layer_turns_its_states() -> None:
    start = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    turned = torch.tensor([[0.0, 3.0], [0.0, 5.0]])  # one by a right angle, one not at all
    assert block_influence([start, turned, -turned]) == pytest.approx((0.5, 2.0))


def test_layers_at_the_ends_and_those_of_most_influence_stay() -> None:
    influence = [0.0, 0.0, 0.0, 0.5, 0.1, 0.4, 0.2, 0.3, 0.0, 0.0]
    assert choose_layers(influence, 8) == (0, 1, 2, 3, 5, 7, 8, 9)
    assert choose_layers(influence, 5) == (0, 1, 2, 8, 9)
    with pytest.raises(InvalidInput, match="4 layers is too shallow"):
        choose_layers(influence[:4], 3)
    for wrong in (4, 10, 0):
        with pytest.raises(InvalidInput, match=f"not {wrong}"):
            choose_layers(influence, wrong)


def test_a_child_without_the_layers_that_do_nothing_is_its_parent() -> None:
    model = tiny.llama(num_hidden_layers=8, tie_word_embeddings=True)
    idle(model, (3, 5))
    child = child_of(model, (0, 1, 2, 4, 6, 7))
    ids = tiny.prompt(2, 30)
    with torch.no_grad():
        assert torch.equal(child(input_ids=ids).logits, model(input_ids=ids).logits)
        child.model.layers[0].mlp.down_proj.weight.zero_()
        assert float(model.model.layers[0].mlp.down_proj.weight.abs().sum()) > 0
    assert (len(child.model.layers), child.config.num_hidden_layers, model.config.num_hidden_layers) == (6, 6, 8)


def test_layers_are_taken_back_by_what_their_loss_costs_together() -> None:
    """Layers 1 and 4 are cheap one by one, and dear where both are gone."""

    def cost(without: tuple[int, ...]) -> float:
        return sum(0.1 * index for index in without) + 5.0 * ({1, 4} <= set(without))

    assert restore_layers((4, 1, 2, 3), 2, cost) == ((1, 2), pytest.approx(0.3))
    assert restore_layers((4, 1), 2, cost)[0] == (1, 4)


def test_doing_without_layers_is_what_their_child_does() -> None:
    model, ids = tiny.llama(num_hidden_layers=8), tiny.prompt(2, 20)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        want = child_of(model, (0, 1, 2, 5, 7))(input_ids=ids).logits
        with without_layers(model, (3, 4, 6)):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_layer_that_the_next_one_leans_on_stays(parent: tuple[Any, Any], tmp_path: Path) -> None:
    """Two layers that do nothing at all are those that go, whatever their neighbours do."""
    model, tokenizer = parent
    idle(model, (3, 5))
    quick = replace(SETTINGS, training=TrainSettings(tokens=32, batch=1))
    made = make_pair(model, tokenizer, [TEXT], quick, name="tiny", folder=tmp_path / "child")
    assert made.kept == (0, 1, 2, 4, 6, 7)
    assert made.made["choice"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert len(made.made["choice"]["considered"]) == 3


def test_kinds_of_layers_stay_with_them() -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    model = tiny.gemma3(num_hidden_layers=8, layer_types=kinds)
    child = child_of(model, (0, 1, 2, 5, 6, 7))
    assert child.config.layer_types == [kinds[index] for index in (0, 1, 2, 5, 6, 7)]
    assert model.config.layer_types == kinds


def test_states_are_those_before_each_layer_and_after_the_last() -> None:
    model, ids = tiny.llama(num_hidden_layers=3), tiny.prompt(1, 9)
    with torch.no_grad(), watched_states(model) as states:
        for _ in range(2):
            want = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert all(torch.equal(found, own) for found, own in zip(states[:3], want[:3], strict=True))
    assert torch.equal(model.model.norm(states[3]), want[3])


def test_the_loss_in_pieces_is_the_loss_and_so_is_its_gradient() -> None:
    torch.manual_seed(0)
    hidden, taught = torch.randn(600, 12, requires_grad=True), torch.randn(600, 16)
    head, teacher_head = torch.randn(50, 12), torch.randn(50, 16)
    loss = _HeadKL.apply(hidden, head, taught, teacher_head)
    (3 * loss).backward()
    found = hidden.grad.clone()
    hidden.grad = None
    said, want = (torch.log_softmax(x @ w.T, -1) for x, w in ((hidden, head), (taught, teacher_head)))
    plain = torch.nn.functional.kl_div(said, want, log_target=True, reduction="batchmean")
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, hidden.grad)


def test_adam_is_that_of_torch() -> None:
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    own, other = Adam({"w": mine}), torch.optim.Adam([theirs], betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        gradient = torch.randn(5, 3) * 0.1
        for weight in (mine, theirs):
            weight.grad = gradient.clone()
        other.param_groups[0]["lr"] = rate = 0.1 / (step + 1)
        own.step(rate)
        other.step()
        torch.testing.assert_close(mine, theirs)
    mine.grad = torch.full((5, 3), math.nan)
    with pytest.raises(InvalidInput, match="not finite at step 6"):
        own.step(0.1)


def test_long_gradients_are_cut_to_length() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    own = Adam({"w": weight})
    weight.grad = torch.full((4,), 50.0)
    own.step(0.1)
    torch.testing.assert_close(own.first[0], torch.full((4,), 0.05))


def test_the_rate_goes_up_and_then_down_to_nothing() -> None:
    settings = TrainSettings(tokens=1000, minutes=2.0, rate=1.0, warmup=0.1)
    assert [settings.rate_at(done) for done in (0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert 0 < settings.rate_at(0.0) < 0.05
    assert settings.done(500, 0.0) == 0.5
    assert settings.done(100, 90.0) == 0.75
    assert settings.done(2000, 0.0) == 1.0


@pytest.mark.parametrize(
    "wrong", [{}, {"tokens": 0}, {"minutes": -1.0}, {"tokens": 9, "rate": math.inf}, {"tokens": 9, "warmup": 1.0}]
)
def test_trainings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        TrainSettings(**wrong)


def test_a_stopped_process_does_not_use_up_its_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("kvferry.hf.train.time.perf_counter", lambda: now[0])
    clock = _Clock(Progress())
    for took in (1.0, 2.0, 1.0, 2.0, 1000.0, 1.0):
        now[0] += took
        last = clock.tick()
    assert last == pytest.approx(6.0 + 8 * 1.5 + 1.0)


def test_every_window_comes_once_a_turn_and_the_order_is_the_seeds() -> None:
    windows = torch.arange(7).unsqueeze(1)

    def rows(settings: TrainSettings, step: int, count: int) -> list[int]:
        batches = _batches(windows, settings, step)
        return [int(row) for _ in range(count) for row in next(batches)]

    settings = TrainSettings(tokens=1, batch=3)
    whole = rows(settings, 0, 14)
    turns = [whole[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(turn) == list(range(7)) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 3
    assert rows(settings, 5, 9) == whole[15:]
    assert rows(replace(settings, seed=1), 0, 14) != whole


def test_a_child_comes_nearer_to_its_parent(parent: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = parent
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = replace(SETTINGS, training=TrainSettings(tokens=4096, batch=4, rate=3e-3))
    made = make_pair(model, tokenizer, [TEXT, TEXT[40:]], settings, name="tiny", folder=tmp_path / "child")
    assert not made.found
    assert len(made.kept) == 6
    assert {0, 1, 2, 6, 7} < set(made.kept)
    child, other = load_model(made.path, dtype="float32")
    assert other("what").input_ids == tokenizer("what").input_ids
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    held = torch.tensor(tokenizer(TEXT * 2).input_ids[-160:]).view(10, 16)
    assert kl(model, child, held) < 0.6 * kl(model, child_of(model, made.kept), held)
    assert all(score > 0 for score in made.made["held_out_nll"].values())
    record = json.loads((tmp_path / "child" / RECORD).read_text())
    assert record["made"] == json.loads(json.dumps(made.made))
    assert record["made"]["progress"]["tokens"] == 4096
    assert not list(tmp_path.glob(".*"))


def test_embeddings_and_head_stay(parent: tuple[Any, Any]) -> None:
    model, _ = parent
    child = child_of(model, (0, 1, 2, 3, 6, 7))
    weights, loss_of = distillation(model, child, (0, 1, 2, 3, 6, 7), states_weight=0.5)
    assert {name.split(".")[1] for name in weights} == {"layers", "norm"}
    loss_of(tiny.prompt(2, 16)).backward()
    assert all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in weights.values())
    assert all(weight.grad is None for weight in (*model.parameters(), child.model.embed_tokens.weight))


def test_a_killed_run_goes_on_to_the_same_bits(parent_folder: str, tmp_path: Path) -> None:
    """Killed in the second time round the text, and then let go on."""

    def make(folder: str, **more: Any) -> None:
        model, tokenizer = load_model(parent_folder, dtype="bfloat16")
        make_pair(model, tokenizer, [TEXT], SETTINGS, name="tiny", folder=tmp_path / folder, **more)

    make("unhindered")
    arguments = [sys.executable, "-m", "tests.hf.killed_pair", parent_folder, str(tmp_path / "killed"), "17"]
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run(arguments, env=models.environment(), cwd=root, check=False).returncode == 9
    assert not (tmp_path / "killed").exists()
    make("killed")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("unhindered", "killed"))
    assert one == other
    record = json.loads((tmp_path / "killed" / RECORD).read_text())
    assert record["made"]["progress"]["resumed"] == 17 * 32


def test_a_child_that_is_there_is_not_made_again(parent: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = parent
    arguments = {"name": "tiny", "folder": tmp_path / "child"}
    first = make_pair(model, tokenizer, [TEXT], SETTINGS, **arguments)
    again = make_pair(model, tokenizer, [TEXT], SETTINGS, **arguments)
    assert (again.found, again.path, again.kept) == (True, first.path, first.kept)
    assert again.made == json.loads(json.dumps(first.made))
    with pytest.raises(InvalidInput, match="not made in this very way"):
        make_pair(model, tokenizer, [TEXT[1:]], SETTINGS, **arguments)
    (tmp_path / "child" / RECORD).write_text("{")
    with pytest.raises(InvalidInput, match="not made in this very way"):
        make_pair(model, tokenizer, [TEXT], SETTINGS, **arguments)


def test_folders_by_default_are_named_after_all_that_counts(
    parent: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    model, tokenizer = parent
    quick = replace(SETTINGS, training=TrainSettings(tokens=32, batch=1))
    paths = [
        make_pair(model, tokenizer, [text], settings, name="some/tiny model").path
        for text, settings in ((TEXT, quick), (TEXT[3:], quick), (TEXT, replace(quick, states_weight=0.0)))
    ]
    assert len(set(paths)) == 3
    assert all(Path(path).parent == tmp_path / "pairs" for path in paths)
    assert all(Path(path).name.startswith("tiny-model-6of8-") for path in paths)


def test_two_makers_of_one_folder(parent: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = parent
    with working_folder(tmp_path / "child"), pytest.raises(InvalidInput, match="another process"):
        make_pair(model, tokenizer, [TEXT], SETTINGS, name="tiny", folder=tmp_path / "child")


def test_checkpoints_that_are_none_of_this_training(parent: tuple[Any, Any], tmp_path: Path) -> None:
    weights = {"w": torch.nn.Parameter(torch.zeros(3))}
    windows, settings = torch.zeros(4, 8, dtype=torch.int64), TrainSettings(tokens=64, batch=1)

    def go(bound_to: str, weights: dict[str, torch.nn.Parameter] = weights) -> None:
        train(
            weights,
            lambda ids: (next(iter(weights.values())) - 1).square().sum(),
            windows,
            settings,
            checkpoint=tmp_path / "c",
            bound_to=bound_to,
        )

    go("this")
    with pytest.raises(CorruptPacket, match="another training"):
        go("that")
    with pytest.raises(CorruptPacket, match="other weights"):
        go("this", {"w": torch.nn.Parameter(torch.zeros(4))})
    raw = bytearray((tmp_path / "c").read_bytes())
    raw[-3] ^= 1
    (tmp_path / "c").write_bytes(raw)
    with pytest.raises(CorruptPacket):
        go("this")
    write_container(tmp_path / "c", "training", {}, {"bound_to": "this", "progress": '{"steps": 3}'})
    with pytest.raises(CorruptPacket, match="fits together"):
        go("this")


def test_models_and_texts_that_cannot_be_used(parent: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = parent
    arguments = {"name": "tiny", "folder": tmp_path / "child"}
    with pytest.raises(InvalidInput, match="not even one window of 16"):
        make_pair(model, tokenizer, [TEXT, "short"], SETTINGS, **arguments)
    with pytest.raises(InvalidInput, match="no text"):
        make_pair(model, tokenizer, [], SETTINGS, **arguments)
    with pytest.raises(InvalidInput, match="float16"):
        make_pair(tiny.llama(num_hidden_layers=8, dtype=torch.float16), tokenizer, [TEXT], SETTINGS, **arguments)
    with pytest.raises(InvalidInput, match="not 8"):
        make_pair(model, tokenizer, [TEXT], replace(SETTINGS, layers=8), **arguments)
    with pytest.raises(InvalidInput, match="give another folder"):
        make_pair(model, tokenizer, [TEXT], SETTINGS, name="tiny", folder=Path("/proc/child"))
    gpt = tiny.build(GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=32, n_layer=8, n_head=2, n_positions=64))
    for other in (gpt, tiny.gemma3n()):
        with pytest.raises(InvalidInput, match="plain list of layers"):
            make_pair(other, tokenizer, [TEXT], SETTINGS, **arguments)
    cohere = tiny.build(
        CohereConfig(
            vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="scaled or capped"):
        make_pair(cohere, tokenizer, [TEXT], SETTINGS, **arguments)
    for wrong in ({"window": 4}, {"held_out": 0.5}, {"states_weight": -1.0}, {"measured": 0}):
        with pytest.raises(InvalidInput):
            PairSettings(SETTINGS.training, **wrong)


def test_cross_entropy_is_the_models_own_loss(parent: tuple[Any, Any]) -> None:
    model, _ = parent
    ids = tiny.prompt(3, 300).remainder(tiny.VOCABULARY)[:, :250]
    with torch.no_grad():
        want = float(model(input_ids=ids, labels=ids).loss)
    assert cross_entropy(model, ids) == pytest.approx(want, rel=1e-5)


def test_a_tiny_pair_from_scratch(tmp_path: Path) -> None:
    made = make_tiny_pair(TrainSettings(tokens=6_144, batch=8, rate=4e-3), folder=tmp_path / "pair")
    large, tokenizer = load_model(Path(made.path) / "large", dtype="float32")
    small, other = load_model(Path(made.path) / "small", dtype="float32")
    text = "Mapping caches, naïvely: 10 layers → 6."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert other(text).input_ids == tokenizer(text).input_ids
    for name in ("num_key_value_heads", "head_dim", "vocab_size", "rope_parameters"):
        assert getattr(large.config, name) == getattr(small.config, name)
    assert large.config.num_hidden_layers > small.config.num_hidden_layers
    for name in ("large", "small"):
        assert made.made[name]["held_out_nll"] < math.log(tokenizer.vocab_size) - 0.1
    assert make_tiny_pair(TrainSettings(tokens=6_144, batch=8, rate=4e-3), folder=tmp_path / "pair").found
