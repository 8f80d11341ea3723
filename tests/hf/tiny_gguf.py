"""A built-in model of a few kilobytes, in real wheels that real pip finds in a local folder.

Run as a script, ``tiny_gguf.py WHEELS SHA256 SIZE`` locates that model in ``$KVFERRY_CACHE`` and prints its folder:
several such processes contend for it, or are killed, in the tests.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np

from kvferry.hf.builtin import BuiltIn, locate

NAME = "kvferry-tiny-test-model"
PACKAGE = NAME.replace("-", "_")
VERSION = "1.0"


def entry(size: int, sha256: str) -> BuiltIn:
    """The model as the table of built-in models would hold it, in two parts."""
    wheel = f"{NAME}=={VERSION}"
    return BuiltIn(
        name="tiny",
        repo="kvferry-tests/no-such-repository",
        wheels=(wheel,),
        parts=((wheel, f"{PACKAGE}/model.part0"), (wheel, f"{PACKAGE}/model.part1")),
        notices=((wheel, f"{PACKAGE}/NOTICE"),),
        gguf="tiny.gguf",
        size=size,
        sha256=sha256,
    )


def make_wheel(folder: Path) -> BuiltIn:
    """Write the wheel into ``folder``; returns the model's entry."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.unlink()
    info = f"{PACKAGE}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{PACKAGE}-{VERSION}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{PACKAGE}/model.part0", data[:5000])
        wheel.writestr(f"{PACKAGE}/model.part1", data[5000:])
        wheel.writestr(f"{PACKAGE}/NOTICE", "made for tests")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return entry(len(data), hashlib.sha256(data).hexdigest())


def write_gguf(path: Path, layers: int = 1, width: int = 32, heads: int = 2) -> None:
    """A Llama of random float32 weights with a byte-level tokenizer of 260 tokens."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x100 + value) for value in range(256)), "Āā"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["Ā ā"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(layers):
        for part in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{part}.weight", width)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", width, width)
        for part in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{part}.weight", 2 * width, width)
        add(f"blk.{layer}.ffn_down.weight", width, 2 * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    sys.stdout.write(f"{locate(entry(int(sys.argv[1]), sys.argv[2]))}\n")
