"""The identity read from a checkpoint is the one of the model that transformers loads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.errors import ModelUnavailable, UnsupportedCache
from kvferry.hf.checkpoint import identity_of_checkpoint
from kvferry.hf.identity import identity_of
from tests.hf.tiny import gemma3, llama


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_it_is_the_loaded_models(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    folder = saved(llama(3, tie_word_embeddings=tied), tmp_path)
    have, want = identity_of_checkpoint(folder, dtype), identity_of(loaded(folder, dtype))
    assert have.differences(want) == {}
    assert have.layers == want.layers
    assert have.dtype == want.dtype


def test_sliding_layers_and_several_files(tmp_path: Path) -> None:
    folder = saved(gemma3(1, torch.bfloat16), tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    want = identity_of(loaded(folder, torch.bfloat16))
    assert identity_of_checkpoint(folder, torch.bfloat16).differences(want) == {}


def test_one_weight_or_another_dtype_makes_a_difference(tmp_path: Path) -> None:
    folder = saved(llama(3), tmp_path)
    before = identity_of_checkpoint(folder, torch.float32)
    assert {"weights", "dtype"} <= identity_of_checkpoint(folder, torch.bfloat16).differences(before).keys()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert identity_of_checkpoint(folder, torch.float32).differences(before).keys() == {"weights"}


def test_a_stray_file_of_weights_is_not_the_models(tmp_path: Path) -> None:
    """Beside one file, or beside those of an index: a load reads neither."""
    for name, options in (("one", {}), ("several", {"max_shard_size": "60KB"})):
        folder = saved(llama(3), tmp_path / name, **options)
        before = identity_of_checkpoint(folder, torch.float32)
        tensors = {key: tensor + 1 for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
        save_file(tensors, folder / "zz-adapter.safetensors", metadata={"format": "pt"})
        assert identity_of_checkpoint(folder, torch.float32).differences(before) == {}
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="index"):
        identity_of_checkpoint(folder, torch.float32)


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = saved(llama(3), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(missing, file)
    with pytest.raises(ModelUnavailable, match=r"no weight 'model\.norm\.weight'"):
        identity_of_checkpoint(folder, torch.float32)
    save_file({**missing, "model.norm.weight": torch.zeros(3)}, file)
    with pytest.raises(ModelUnavailable, match=r"is \(3,\), the model's \(64,\)"):
        identity_of_checkpoint(folder, torch.float32)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        identity_of_checkpoint(folder, torch.float32)
    file.unlink()
    with pytest.raises(ModelUnavailable, match="no safetensors weights"):
        identity_of_checkpoint(folder, torch.float32)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(llama(3), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCache, match="quantised weights"):
        identity_of_checkpoint(folder, torch.bfloat16)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models(name: str, model_of: Any) -> None:
    model, _ = model_of(name)
    have = identity_of_checkpoint(name, torch.bfloat16)
    assert have.differences(identity_of(model)) == {}
    assert have.model == name
