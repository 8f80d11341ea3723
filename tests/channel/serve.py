"""A producer process for the tests: serves hand-offs ``h0``, ``h1``… until its input ends, then says its peak memory.

``python serve.py COUNT FRAMES BYTES [CHANNEL]``; the frames' content is a function of hand-off and index.
"""

from __future__ import annotations

import resource
import sys

from kvferry.channel import ends


def frame(handoff: str, index: int, size: int) -> bytes:
    pattern = f"{handoff}/{index};".encode()
    return (pattern * (size // len(pattern) + 1))[:size]


def main() -> None:
    count, frames, size = map(int, sys.argv[1:4])
    with ends(sys.argv[4] if len(sys.argv) > 4 else "socket")[0]() as sender:
        for number in range(count):
            outgoing = sender.announce(f"h{number}")
            outgoing.begin(outgoing.handoff.encode(), [size] * frames)
            for index in range(frames):
                outgoing.push(frame(outgoing.handoff, index, size))
        sys.stdout.write(f"{sender.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")


if __name__ == "__main__":
    main()
