"""The codec beside memcpy and every peer that is installed, in one run.

    python -m benchmarks.bench_codec [--json FILE] [--megabytes 1.5 --megabytes 64] [--peers all|none|NAME,NAME]

`kvferry bench codec` is the same without the peers of other packages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import record
from benchmarks.peers import PEERS
from kvferry.evaluate import bench_codec


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--megabytes", type=float, action="append")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--quantizers", default=",".join(bench_codec.QUANTIZERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="most time for one arm's samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", default="all", help=f"all, none, or some of {', '.join(PEERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = {"all": list(PEERS), "none": []}.get(options.peers, options.peers.split(","))
    settings = bench_codec.CodecBenchSettings(
        quantizers=tuple(options.quantizers.split(",")),
        dtypes=tuple(options.dtype or ("bfloat16", "float16")),
        threads=tuple(options.threads or (1, 2)),
        megabytes=tuple(options.megabytes or (1.5, 64.0)),
        head_dim=options.head_dim,
        rounds=options.rounds,
        seconds=options.seconds,
        seed=options.seed,
    )
    result = bench_codec.run(settings, {name: PEERS[name] for name in names}, record.tell)
    record.write(options.json, "bench codec", result.to_json(), seed=options.seed)


if __name__ == "__main__":
    main()
