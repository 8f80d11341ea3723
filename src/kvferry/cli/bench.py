"""``kvferry bench``: speed, always as a ratio to something in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvferry.cli import tables
from kvferry.cli.common import DTYPES, SEED, Common, command, working
from kvferry.cli.lazy import LazyGroup
from kvferry.errors import InvalidInput

COMMANDS = {
    "codec": ("kvferry.cli.bench:codec", "Encode and decode, beside memcpy and other codecs."),
    "handoff": ("kvferry.cli.bench_handoff:bench_handoff", "Time to the first token over links of stated rates."),
    "map": ("kvferry.cli.bench_map:bench_map", "A mapped cache beside the target's own prefill."),
}
"""Name -> where the command is, and its line in the help."""


MOST_MEGABYTES = 8192
"""The source is held several times over."""


@click.group("bench", cls=LazyGroup, lazy=COMMANDS)
def bench() -> None:
    """Measure speed, beside memcpy and other codecs in the same run."""


@command("bench codec")
@click.option(
    "--threads", "thread_counts", type=click.IntRange(1, 4096), multiple=True, help="May be repeated. [default: 1, 2]"
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Of the source; may be repeated. [default: bfloat16, float16]",
)
@click.option(
    "--megabytes",
    type=float,
    multiple=True,
    help=f"MiB of source, at most {MOST_MEGABYTES:,}; may be repeated. [default: 64]",
)
@click.option("--head-dim", type=click.IntRange(1, 65536), default=128, show_default=True, help="Of the source.")
@click.option("--quantizers", metavar="SPEC,…", help="What to measure; `mixed` is a mixture. [default: a selection]")
@click.option("--peers", metavar="NAME,…", default="all", show_default=True, help="Codecs made of torch, or none.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Samples of each.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the data and the order.")
def codec(
    common: Common,
    thread_counts: tuple[int, ...],
    dtypes: tuple[str, ...],
    megabytes: tuple[float, ...],
    head_dim: int,
    quantizers: str | None,
    peers: str,
    rounds: int,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Time encode and decode, interleaved with memcpy of the same bytes and with other codecs.

    GB/s are bytes of the source; a ratio of 1 is memcpy by one thread.
    """
    from kvferry.evaluate import bench_codec
    from kvferry.evaluate.codec_peers import PEERS

    names = {"all": list(PEERS), "none": []}.get(peers, peers.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise InvalidInput(f"unknown peer {unknown[0]!r}; there are all, none, {', '.join(PEERS)}")
    wrong = [size for size in megabytes if not 0 < size <= MOST_MEGABYTES]
    if wrong:
        raise InvalidInput(f"--megabytes is {wrong[0]:g}: give a number above 0 and of at most {MOST_MEGABYTES:,}")
    defaults = bench_codec.CodecBenchSettings()
    settings = bench_codec.CodecBenchSettings(
        quantizers=tuple(quantizers.split(",")) if quantizers else defaults.quantizers,
        dtypes=dtypes or defaults.dtypes,
        threads=thread_counts or defaults.threads,
        megabytes=megabytes or defaults.megabytes,
        head_dim=head_dim,
        rounds=rounds,
        seed=common.seed,
    )
    with working("measuring"):
        result = bench_codec.run(settings, {name: PEERS[name] for name in names})

    def show() -> None:
        head = ("codec", "work", "quantizer", "dtype", "MiB", "threads", "GB/s", "ratio", "quartiles", "size")
        rows = [
            (
                row.peer, row.op, row.quantizer, row.dtype, f"{row.megabytes:g}", str(row.threads),
                f"{row.gb_per_s:.2f}", f"{row.ratio:.3f}",
                f"{row.ratio_quartiles[0]:.3f} to {row.ratio_quartiles[1]:.3f}", f"{row.size:.3f}",
            )
            for row in result.rows
        ]  # fmt: skip
        tables.show_rows(head, rows, f"GB/s of source; ratio to memcpy by one thread; kernels at level {result.isa}")
        for skipped in result.skipped:
            tables.show_text(f"not measured: {skipped['peer']}, {skipped['dtype']}", skipped["reason"])

    return result.to_json(), show
