"""The identity of a model that another library runs, read from the checkpoint that it was loaded from.

An engine fuses, splits and casts weights as it likes; what it loaded lies in the folder. The names, shapes and dtypes
that the model would have here come from its class, built on torch's ``meta`` device, which takes no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvferry.errors import ModelUnavailable, UnsupportedCache
from kvferry.hf import builtin
from kvferry.hf.compat import VERSION
from kvferry.hf.facts import config_facts
from kvferry.hf.geometry import geometry_of, text_config
from kvferry.hf.identity import named_weights, weights_hash
from kvferry.hf.models import resolve
from kvferry.hf.quiet import quiet
from kvferry.snapshot import Identity, dtype_name
from kvferry.version import __version__


def identity_of_checkpoint(
    name_or_path: str | Path, dtype: torch.dtype, *, attention: str | None = None, construction: tuple[str, ...] = ()
) -> Identity:
    """The identity that `kvferry.hf.identity.identity_of` gives once the model is loaded in ``dtype``.

    But for the tokenizer, which is left open. Reads a sample of every tensor of the checkpoint.

    Args:
        name_or_path: a folder with safetensors weights, a hub id, or a built-in name.
        dtype: that the weights are cast to.
        attention: what to record as attention backend.
        construction: how the cache in question came about.

    Raises:
        ModelUnavailable: not found, or no readable safetensors weights under the names that transformers gives them.
        UnsupportedCache: a checkpoint of quantised weights, whose cache depends on who dequantises them; or a cache
            of a kind that kvferry does not carry.
    """
    folder = Path(resolve(name_or_path))
    with quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedCache(
                f"{folder} holds quantised weights: two libraries that dequantise them differ, and so do their caches"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    facts = config_facts(text_config(model))
    return Identity(
        model=builtin.name_of(folder) or str(name_or_path),
        weights=weights_hash(facts, _weights(folder, model)),
        layers=geometry_of(model),
        dtype=dtype_name(dtype),
        attention=attention,
        transformers=VERSION,
        kvferry=__version__,
        construction=construction,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files that a load of the model reads: those of its index, or the one; only where neither is there, all."""
    index, one = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return [folder / Path(name).name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelUnavailable(f"{index} is damaged: {error}") from error
    return [one] if one.is_file() else sorted(folder.glob("*.safetensors"))


def _weights(folder: Path, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight of ``model`` from the files of ``folder``, in the dtype that it has in ``model``."""
    files = _weight_files(folder)
    if not files:
        raise ModelUnavailable(f"{folder} has no safetensors weights to tell the model by")
    with ExitStack() as stack:
        where = {}
        try:
            for file in files:
                handle = stack.enter_context(safe_open(file, framework="pt"))
                where.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"{folder}: the weights cannot be read: {error}") from error
        for name, expected in named_weights(model):
            if name not in where:
                raise ModelUnavailable(f"{folder} has no weight {name!r}, which {type(model).__name__} needs")
            tensor = where[name].get_tensor(name)
            if tensor.shape != expected.shape:
                raise ModelUnavailable(
                    f"{folder}: weight {name!r} is {tuple(tensor.shape)}, the model's {tuple(expected.shape)}"
                )
            yield name, tensor.to(expected.dtype)
