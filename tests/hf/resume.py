"""Another process: ``resume.py MODEL SNAPSHOT LAST_TOKEN THREADS OUT`` loads the files and goes on for 64 tokens."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

import kvferry as kv
from kvferry.hf.models import load_model
from tests.hf.generation import bits, generate

if __name__ == "__main__":
    folder, path, prompt, threads, out = sys.argv[1:]
    torch.set_num_threads(int(threads))  # as the process that wrote the snapshot
    model, _ = load_model(folder)
    snapshot = kv.Snapshot.load(path)
    last = torch.tensor([[int(prompt)]])
    ids = torch.cat([snapshot.token_ids, last], dim=1)
    result = generate(model, snapshot.to_cache(model), ids)
    save_file({"tokens": result.sequences, "bits": bits(result.logits)}, out)
