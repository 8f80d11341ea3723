"""Loading: what names stand for, what is refused and why, and that nobody's settings or terminal are touched."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvferry as kv
from kvferry.hf import builtin, hub
from kvferry.hf.models import load_model, loaded_as, resolve
from kvferry.hf.quiet import quiet
from tests.hf import tiny

ModelFactory = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: tuple[Any, Any]) -> Path:
    """A tiny model in float32 with a real tokenizer, as a user's own folder."""
    path = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(path)
    smollm2[1].save_pretrained(path)
    return path


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_every_dtype_is_one_rounding_of_the_same_numbers(model_of: ModelFactory, name: str) -> None:
    exact = dict(model_of(name, "float32")[0].named_parameters())
    assert {parameter.dtype for parameter in exact.values()} == {torch.float32}
    for dtype in ("bfloat16", "float16"):
        model = model_of(name, dtype)[0]
        assert not model.training
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(parameter, exact[parameter_name].to(parameter.dtype)), parameter_name


@pytest.mark.model
def test_what_belongs_to_a_model_survives_the_conversion(smollm2: tuple[Any, Any], gemma3: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.config.num_hidden_layers == 30
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("Hello, world").input_ids) == "Hello, world"

    model, tokenizer = gemma3
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert [index for index, name in enumerate(model.config.layer_types) if name == "full_attention"] == [5, 11, 17]
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id == 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.chat_template is None


@pytest.mark.model
def test_a_built_in_model_knows_its_name_by_its_folder_too(smollm2: tuple[Any, Any]) -> None:
    path = resolve("smollm2-135m")
    assert Path(path).is_dir()
    assert resolve(path) == path
    model, _ = load_model(path)
    known, by_name = loaded_as(model), loaded_as(smollm2[0])
    assert known is not None
    assert by_name is not None
    assert known.name == by_name.name == "smollm2-135m"


def test_a_folder_is_loaded_in_the_dtype_asked_for(folder: Path) -> None:
    for dtype in ("float64", "float32", "bfloat16", torch.float16):
        model, _ = load_model(folder, dtype=dtype, attn="eager")
        assert model.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
        assert model.config._attn_implementation == "eager"
        assert not model.training
    known = loaded_as(model)
    assert known is not None
    assert (known.name, known.revision) == (str(folder), None)
    assert loaded_as(tiny.llama()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"attn": "sdp"}, "attention backend 'sdp'"),
        ({"device": "nowhere"}, "device 'nowhere'"),
        ({"revision": "main"}, "no revisions"),
    ],
)
def test_bad_options_are_the_callers_fault(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(kv.InvalidInput, match=message):
        load_model(folder, **options)


def test_what_cannot_be_had_is_named(tmp_path: Path, folder: Path) -> None:
    for name in ("no-such-model", "./no/such/folder", "a/b/c", str(tmp_path / "absent")):
        with pytest.raises(kv.ModelUnavailable, match="smollm2-135m"):
            load_model(name)
    with pytest.raises(kv.ModelUnavailable, match="HF_HUB_OFFLINE"):
        load_model("kvferry-tests/no-such-repository")
    with pytest.raises(kv.ModelUnavailable, match=r"config\.json"):
        load_model(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(kv.ModelUnavailable, match="name of a model is empty"):
        resolve(" ")
    with pytest.raises(kv.ModelUnavailable, match="is a file"):
        load_model(file)


def test_a_folder_that_transformers_cannot_read_is_named(tmp_path: Path, folder: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(kv.ModelUnavailable, match="broken"):
        load_model(broken)
    shutil.copytree(folder, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises(kv.ModelUnavailable, match="mute"):
        load_model(tmp_path / "mute")


def test_pickled_weights_are_not_opened(tmp_path: Path, folder: Path) -> None:
    import shutil

    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(tiny.llama().state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(kv.ModelUnavailable):
        load_model(pickled)


def test_a_hub_snapshot_on_disk_is_found_offline_with_its_commit(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub.cached("someone/tiny") == snapshot
    assert resolve("someone/tiny") == str(snapshot)
    model, _ = load_model("someone/tiny", dtype="float32")
    known = loaded_as(model)
    assert known is not None
    assert (known.name, known.revision) == ("someone/tiny", commit)
    assert hub.cached("someone/else") is None


def test_loading_says_nothing_and_leaves_settings_alone(folder: Path) -> None:
    script = (
        "import warnings; import transformers.models.llama.modeling_llama; import kvferry.hf.models as kv;"
        "from transformers.utils import logging as t; warnings.simplefilter('error');"
        "before = (t.get_verbosity(), t.is_progress_bar_enabled(), warnings.filters[:]);"
        f"kv.load_model({str(folder)!r});"
        "assert before == (t.get_verbosity(), t.is_progress_bar_enabled(), warnings.filters[:])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_quiet_is_over_after_an_exception() -> None:
    verbosity = transformers.utils.logging.get_verbosity()
    level = logging.getLogger("huggingface_hub").level

    def fail() -> None:
        with quiet():
            warnings.warn("not shown", FutureWarning, stacklevel=1)
            assert not transformers.utils.logging.is_progress_bar_enabled()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert transformers.utils.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert logging.getLogger("huggingface_hub").level == level


def test_names_in_the_table_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kv.ModelUnavailable, match=", ".join(builtin.BUILT_IN)):
        resolve("smollm2")
