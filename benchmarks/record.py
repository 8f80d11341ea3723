"""Result files of the benchmarks: the same object as a command's ``--json``, kept with all that it was made with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.cli.common import Common, as_json
from kvferry.snapshot.files import write_text


def write(path: Path | None, command: str, result: Mapping[str, Any], *, seed: int, threads: int | None = None) -> None:
    """Write the object to ``path``, or to standard output."""
    content = json.loads(as_json(Common(command, True, seed=seed, threads=threads), result))
    content["environment"]["arguments"] = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def tell(line: str) -> None:
    """Progress, for whoever watches."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
