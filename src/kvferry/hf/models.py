"""Models by a local path, a hub id or a built-in name."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvferry.errors import InvalidInput, ModelUnavailable
from kvferry.hf import builtin, hub
from kvferry.hf.quiet import quiet
from kvferry.snapshot import dtype_from_name, dtype_name


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_model` knows of a model that it loaded.

    Attributes:
        name: built-in name, hub id or path.
        revision: the hub's commit, where it came from there.
        tokenizer: the tokenizer that belongs to it.
    """

    name: str
    revision: str | None
    tokenizer: PreTrainedTokenizerBase


_loaded: weakref.WeakKeyDictionary[PreTrainedModel, Loaded] = weakref.WeakKeyDictionary()


def loaded_as(model: PreTrainedModel) -> Loaded | None:
    """How `load_model` came by ``model``; ``None`` for a model that was made otherwise."""
    return _loaded.get(model)


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    attn: str = "sdpa",
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A causal language model, ready for inference, and its tokenizer.

    Args:
        name_or_path: a folder in transformers' layout with safetensors weights, a hub id, or a built-in name
            (``smollm2-135m``, ``gemma3-270m``).
        dtype: of the weights and of the cache: ``bfloat16``, ``float16``, ``float32``, ``float64``.
        attn: attention backend: ``sdpa``, ``eager``, or another that transformers knows.
        device: where the model goes.
        revision: branch, tag or commit, for a hub id.

    Raises:
        InvalidInput: an unknown dtype, attention backend or device.
        ModelUnavailable: not found, not fetched, or not readable; says what was tried and why each failed.
    """
    torch_dtype = dtype_from_name(dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype)
    if attn != "eager" and attn not in AttentionInterface().valid_keys():
        raise InvalidInput(
            f"unknown attention backend {attn!r}: sdpa, eager and those registered with transformers are"
        )
    place = _device(device)
    folder = Path(resolve(name_or_path, revision=revision))
    with quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch_dtype,
                attn_implementation=attn,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # safetensors and tokenizers raise classes of no common base, some a bare Exception
            raise ModelUnavailable(f"transformers cannot load {folder}: {_brief(error)}") from error
    model = model.to(place).eval()
    name, commit = _name(name_or_path, folder)
    _loaded[model] = Loaded(name, commit, tokenizer)
    return model, tokenizer


def resolve(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """The local folder that a name or path stands for, fetched first where needed.

    A second process given the folder loads the very same files, whatever the network does in between.

    Raises:
        InvalidInput: ``revision`` for what has none.
        ModelUnavailable: not found or not fetched; says what was tried and why each failed.
    """
    text = str(name_or_path)
    if not text.strip():
        raise ModelUnavailable(
            f"the name of a model is empty: give a folder, a hub id (owner/name), or {' or '.join(builtin.BUILT_IN)}"
        )
    known = builtin.BUILT_IN.get(text)
    path = Path(text).expanduser()
    if revision is not None and (known is not None or path.exists()):
        raise InvalidInput(f"{text} has no revisions; only a hub id has")
    if known is not None:
        return str(builtin.locate(known))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"{path} has no config.json: it is no model folder in transformers' layout")
        return str(path.resolve())
    if path.exists():
        raise ModelUnavailable(f"{path} is a file; give the folder that holds config.json and the weights")
    if isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ModelUnavailable(
            f"{text!r} is no folder, no hub id (owner/name), and no built-in name ({', '.join(builtin.BUILT_IN)})"
        )
    return str(hub.fetch(text, revision))


def _name(given: str | Path, folder: Path) -> tuple[str, str | None]:
    """Name and commit to record for a model in ``folder``; a converted or hub folder tells its own."""
    known = builtin.name_of(folder)
    if known is not None:
        return known, None
    snapshot = hub.name_of(folder)
    return (str(given), None) if snapshot is None else snapshot


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidInput(f"device {device!r} cannot be used: {_brief(error)}") from error
    return place


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
