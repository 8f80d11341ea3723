"""Writes two snapshots over each other without end, for `test_storage` to kill: ``python -m … PATH [stop]``."""

import os
import sys
import time

from kvferry.snapshot import FULL
from kvferry.snapshot.storage import save_snapshot
from tests.snapshot.builders import make_snapshot


def version(seed: int):
    """The snapshots that take turns: large enough that a kill lands inside of a write."""
    return make_snapshot([FULL] * 8, seq_len=2048, kv_heads=4, head_dim=32, seed=seed)


def main(path: str, stop: bool) -> None:
    snapshots = [version(1), version(2)]
    save_snapshot(snapshots[0], path)
    if stop:  # stay at the last moment before the rename, all data written
        os.fsync = lambda descriptor: (announce(), time.sleep(600))
    turn = 0
    while True:
        turn += 1
        save_snapshot(snapshots[turn % 2], path)
        announce()


def announce() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], "stop" in sys.argv)
