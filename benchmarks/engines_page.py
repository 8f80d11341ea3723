"""``engines.md``, from the JSON files of the studies in a folder.

python -m benchmarks.engines_page FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry.report.engines_page import write_engines_page


def main() -> None:
    """Every ``engines-*.json`` of the folder."""
    folder = Path(sys.argv[1])
    print(write_engines_page(folder, sorted(folder.glob("engines-*.json"))))


if __name__ == "__main__":
    main()
