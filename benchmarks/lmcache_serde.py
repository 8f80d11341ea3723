"""The serde beside LMCache's own ``fp8``: bytes, time and loss on a real model's chunks.

    .venv-lmcache/bin/python -m benchmarks.lmcache_serde [--model smollm2-135m] [--json FILE]

Each serde runs as LMCache runs it: made from its settings, through the asynchronous processor, on memory objects, one
thread. Times are the processor time of the whole process, which other work on the machine changes little. The loss is
the mean KL, in nats, of the model's predictions for the tokens behind the cache to those on the cache itself.
"""

from __future__ import annotations

import argparse
import select
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import SerdeConfig, SerdeProcessor, create_serde_processor
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from torch import Tensor

import kvferry as kv
from benchmarks import record
from kvferry.engines.lmcache import register
from kvferry.hf.text import default_text
from kvferry.snapshot import Snapshot

CHUNK, CHUNKS, SUFFIX = 256, 2, 256
SERDES: dict[str, dict[str, Any]] = {
    **{
        spec: {"quantizer": spec}
        for spec in ("raw", "sym8", "chan8b128:asym8g64", "cen5g64:asym5g64", "asym4g64", "chan4b128:asym4g64")
    },
    "budget 0.28": {"budget": 0.28},
}


def memory(shape: torch.Size, dtype: torch.dtype) -> TensorMemoryObj:
    """A memory object outside of any pool."""
    raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    about = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=raw.numel(),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, about, None)


def timed(task: int, query: Callable[[int], bool | None], notifier: int, start: float) -> float:
    """Milliseconds of processor time from ``start`` to the end of a task."""
    poller = select.poll()
    poller.register(notifier, select.POLLIN)
    while (done := query(task)) is None:
        poller.poll(1000)
    elapsed = 1000 * (time.process_time() - start)
    if not done:
        raise SystemExit("a serde failed: LMCache's log says why")
    return elapsed


def through(serde: SerdeProcessor, chunk: Tensor, key: ObjectKey, rounds: int) -> tuple[Tensor, int, float, float]:
    """A chunk after the serde, its bytes, and the medians of encoding and decoding in milliseconds."""
    source, target = memory(chunk.shape, chunk.dtype), memory(chunk.shape, chunk.dtype)
    source.tensor.copy_(chunk)
    size = serde.estimate_serialized_size(MemoryLayoutDesc([chunk.shape], [chunk.dtype]))
    encode, decode = [], []
    for _ in range(rounds):
        stored = memory(torch.Size([size]), torch.uint8)
        start = time.process_time()
        task = serde.submit_serialize([source], [stored], [key])
        encode.append(timed(task, serde.query_serialize_result, serde.get_serialize_event_fd(), start))
        start = time.process_time()
        task = serde.submit_deserialize([stored], [target], [key])
        decode.append(timed(task, serde.query_deserialize_result, serde.get_deserialize_event_fd(), start))
    return target.tensor.clone(), stored.get_size(), statistics.median(encode), statistics.median(decode)


def chunks_of(snapshot: Snapshot) -> list[Tensor]:
    """Cut as LMCache does: ``(2, layers, tokens, hidden)``."""
    pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in snapshot.layers]
    return [part.contiguous() for part in torch.stack(pairs, 1).transpose(2, 3).flatten(3).split(CHUNK, 2)]


def snapshot_of(chunks: list[Tensor], like: Snapshot) -> Snapshot:
    """Inverse of `chunks_of`."""
    whole = torch.cat(chunks, 2)
    layers = []
    for index, layer in enumerate(like.layers):
        keys, values = whole[:, index].unflatten(2, (layer.keys.shape[1], -1)).transpose(1, 2).unsqueeze(1)
        layers.append(layer.map_tensors(keys.contiguous(), values.contiguous()))
    return replace(like, layers=tuple(layers))


@torch.no_grad()
def predictions(model: Any, ids: Tensor, snapshot: Snapshot) -> Tensor:
    """Log probabilities of what follows each token behind the cache."""
    return model(ids, past_key_values=snapshot.to_cache(model)).logits[0].double().log_softmax(-1)


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5, help="of each chunk")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register()
    model, tokenizer = kv.load_model(options.model, dtype="bfloat16")
    ids = tokenizer(default_text(), return_tensors="pt").input_ids[:, : CHUNK * CHUNKS + SUFFIX]
    snapshot = kv.capture(model, ids[:, : CHUNK * CHUNKS])
    chunks, rest = chunks_of(snapshot), ids[:, CHUNK * CHUNKS :]
    geometry = snapshot.identity.layers[0]
    heads = {"num_kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim}
    own = predictions(model, rest, snapshot)
    rows = []
    peers = [(f"kvferry {name}", SerdeConfig("kvferry", {**heads, **more})) for name, more in SERDES.items()]
    for name, config in [*peers, ("LMCache fp8", SerdeConfig("fp8"))]:
        serde = create_serde_processor(config)
        found = [
            through(serde, chunk, ObjectKey(index.to_bytes(32, "big"), options.model, 0x01000100), options.rounds)
            for index, chunk in enumerate(chunks)
        ]
        serde.close()
        shipped = predictions(model, rest, snapshot_of([back for back, *_ in found], snapshot))
        row = {
            "serde": name,
            "bytes": found[0][1],
            "of_raw": round(found[0][1] / chunks[0].nbytes, 4),
            "encode_cpu_ms": round(statistics.median(one[2] for one in found), 1),
            "decode_cpu_ms": round(statistics.median(one[3] for one in found), 1),
            "kl_mean": float((own.exp() * (own - shipped)).sum(-1).mean()),
            "top1_agreement": float((own.argmax(-1) == shipped.argmax(-1)).double().mean()),
        }
        rows.append(row)
        record.tell(str(row))
    result = {"model": options.model, "chunk_tokens": CHUNK, "chunks": CHUNKS, "suffix": SUFFIX, "rows": rows}
    record.write(options.json, "bench lmcache serde", result, seed=0)


if __name__ == "__main__":
    main()
