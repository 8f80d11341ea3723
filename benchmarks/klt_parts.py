"""What each part of the transform codec buys, at equal bytes, and where its time goes.

    python -m benchmarks.klt_parts MODEL [--text FILE] [--windows N] [--budget B] [--json FILE]

The transform is the one that is kept for the model (`kvferry ship calibrate`). A variant is the same codec with one
part taken out; each has a step of its own, so that all have the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import zstandard

from benchmarks import record
from kvferry.evaluate.perplexity import PreparedWindow
from kvferry.evaluate.scores import TokenScores, fidelity, perplexity
from kvferry.evaluate.windows import cut_windows
from kvferry.hf.identity import identity_of
from kvferry.hf.models import load_model
from kvferry.hf.text import default_text
from kvferry.ship.encode import decode, encode
from kvferry.ship.packet import Packet
from kvferry.ship.transform.artifact import Transform
from kvferry.ship.transform.basis import Basis
from kvferry.ship.transform.store import for_model
from kvferry.ship.transform.weights import Importance


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's own reference topics")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--suffix", type=int, default=1024)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load_model(given.model, dtype="bfloat16")
    words = default_text() if given.text is None else given.text.read_text(encoding="utf-8")
    whole = for_model(identity_of(model))
    variants = {name: part(whole) for name, part in VARIANTS.items()}
    scores: dict[str, list[TokenScores]] = {name: [] for name in variants}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    budgets: dict[str, list[float]] = {name: [] for name in variants}
    full: list[TokenScores] = []
    cut = cut_windows(tokenizer, words, windows=given.windows, prefix=given.prefix, suffix=given.suffix)
    for window in cut:
        prepared = PreparedWindow(model, window)
        full.append(prepared.full)
        for name, transform in variants.items():
            record.tell(f"window {window.index + 1} of {len(cut)}: {name}")
            began = time.perf_counter()
            packet = encode(prepared.snapshot, given.budget, "klt", transform=transform)
            encoded = time.perf_counter()
            shipped = decode(packet, transform=transform)
            seconds[name].append((encoded - began, time.perf_counter() - encoded))
            budgets[name].append(packet.budget)
            scores[name].append(prepared.score(shipped))
            if name == WHOLE:
                zipped = squeezed(packet)
    rows = []
    for name in variants:
        near, ppl = fidelity(scores[name]), perplexity(scores[name], full)
        rows.append(
            {
                "variant": name,
                "budget": statistics.mean(budgets[name]),
                "kl_mean": near.kl_mean,
                "ppl_delta_pct": ppl.delta_pct,
                "ppl_delta_ci": ppl.delta_ci,
                "encode_seconds": statistics.median(pair[0] for pair in seconds[name]),
                "decode_seconds": statistics.median(pair[1] for pair in seconds[name]),
            }
        )
    settings = {"windows": len(cut), "prefix": given.prefix, "suffix": given.suffix}
    result = {"model": {"model": given.model}, "settings": settings, "rows": rows, "zstd_of_packet": zipped}
    record.write(given.json, "klt parts", result, seed=0, threads=given.threads)


def squeezed(packet: Packet) -> float:
    """What zstd makes of the packet's frames, over their bytes: 1 where nothing is left to find."""
    data = b"".join(packet.frames)
    return len(zstandard.compress(data, 19)) / len(data)


def _importance(transform: Transform, change: Callable[[Importance], Importance]) -> Transform:
    return replace(transform, importance=tuple(change(own) for own in transform.importance))


def without_attention(transform: Transform) -> Transform:
    """A token's weight is told from its place alone."""

    def change(own: Importance) -> Importance:
        blind = torch.cat([own.position[:1], torch.zeros(1), own.position[1:]])
        return Importance(blind, own.position)

    return _importance(transform, change)


def without_weights(transform: Transform) -> Transform:
    """All tokens have the same step."""
    return _importance(transform, lambda own: Importance(torch.zeros(4), torch.zeros(3)))


def by_layer(transform: Transform) -> Transform:
    """Components of one layer see that layer alone: what the group's layers have in common is sent again and again."""
    return replace(transform, bases=tuple(_apart(basis) for basis in transform.bases))


def _apart(basis: Basis) -> Basis:
    """PCA of each layer in the same metric, from the covariance that the basis stands for."""
    sizes = (basis.level.float() / 32).exp2()
    back = basis.back.double()
    spread = (back * sizes.double().square()) @ back.T
    metric = basis.forward.double().T @ basis.forward.double()
    forward, backward, levels = torch.zeros_like(metric), torch.zeros_like(metric), []
    for where in _blocks(basis):
        own = metric[where, where]
        factor = torch.linalg.cholesky(own + 1e-9 * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype))
        size, turn = torch.linalg.eigh(factor.T @ spread[where, where] @ factor)
        forward[where, where] = turn.T @ factor.T
        backward[where, where] = torch.linalg.solve(factor.T, turn)
        levels.append((16 * size.clamp_min(2.0**-60).log2()).round())
    own = torch.cat(levels).to(torch.int16)
    mean = forward @ (back @ basis.mean.double())
    return replace(basis, forward=forward.float(), back=backward.float(), mean=mean.float(), level=own, spread=own - 64)


def _blocks(basis: Basis) -> Iterator[slice]:
    at = 0
    for size in basis.group.sizes:
        yield slice(at, at + size)
        at += size


WHOLE = "whole codec"

VARIANTS: dict[str, Callable[[Transform], Transform]] = {
    WHOLE: lambda transform: transform,
    "weights from the token's place alone, not from attention": without_attention,
    "one step for all tokens": without_weights,
    "each layer by itself": by_layer,
}

if __name__ == "__main__":
    main()
