"""``speed.md`` and its plot, from the JSON files of the benchmarks in a folder.

python -m benchmarks.speed_page FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry.report.bench import write_page


def main() -> None:
    """Every ``speed-*.json`` of the folder."""
    folder = Path(sys.argv[1])
    for path in write_page(folder, sorted(folder.glob("speed-*.json"))):
        print(path)


if __name__ == "__main__":
    main()
