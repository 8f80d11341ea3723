"""A GGUF file into a folder that transformers loads at once.

The folder holds float32. A GGUF block is a few-bit integer times a 16-bit scale (plus a 16-bit offset), which
transformers dequantises in float32: stored so, a load in float32 or float64 gives those very numbers, and one in
bfloat16 or float16 rounds each of them once. Stored in 16 bit, every other dtype would inherit that rounding.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.errors import ModelUnavailable
from kvferry.hf.quiet import quiet


def gguf_to_safetensors(gguf: Path, folder: Path) -> None:
    """Write model, generation configuration and tokenizer of ``gguf`` into the existing ``folder``.

    Raises:
        ModelUnavailable: transformers cannot read it.
    """
    # The reader draws its progress bar whatever the settings: it goes nowhere.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except Exception as error:  # the readers raise classes of no common base, some a bare Exception
            raise ModelUnavailable(f"transformers cannot read {gguf.name}: {error}") from error
        # A model that came from GGUF counts as quantised for good and refuses to be saved; a fresh one of the same
        # configuration takes its tensors over, without copying them.
        description = loaded.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            description.pop(name, None)
        config = type(loaded.config).from_dict(description)
        config.dtype = torch.float32
        with torch.device("meta"):
            fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict(), strict=True, assign=True)
        fresh.tie_weights()
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
