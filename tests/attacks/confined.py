"""Reads files with little memory left: ``python -m tests.attacks.confined READER FOLDER BYTES``.

``READER`` is ``module:name`` or ``module:Class.name``. Prints a JSON list of complaints. The address space is limited
to what the process has plus ``BYTES``, so that an allocation of a forged size fails, whoever makes it.
"""

import importlib
import json
import resource
import sys
from functools import reduce
from pathlib import Path

from tests.attacks.mutate import REFUSALS


def main(reader: str, folder: str, room: int) -> list[str]:
    module, _, attributes = reader.partition(":")
    read = reduce(getattr, attributes.split("."), importlib.import_module(module))
    files = sorted(Path(folder).iterdir())
    complaints = [*_refused(read, files[:1])]  # once without the limit: whatever is loaded late is there now
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
    try:
        bytearray(2 * room)
        complaints.append("the limit does not hold")
    except MemoryError:
        pass
    return [*complaints, *_refused(read, files[1:])]


def _refused(read, files):
    for path in files:
        try:
            read(path)
        except REFUSALS:
            continue
        except Exception as error:
            yield f"{path.name}: {type(error).__name__}: {error}"
        else:
            yield f"{path.name}: accepted"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))  # noqa: T201
