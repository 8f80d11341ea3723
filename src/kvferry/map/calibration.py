"""What a mapper is fitted on: moments of the tokens to fit, and of others to choose by."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput
from kvferry.map.blocks import SIDES, Side, block_rows, first_held
from kvferry.map.distributed import all_reduce
from kvferry.map.layout import Layout, plan_layout
from kvferry.map.mapper import Recipe
from kvferry.map.moments import ROWS, Moments
from kvferry.map.pair import require_pair
from kvferry.snapshot import Identity, Snapshot
from kvferry.snapshot.rope import Rotary

SPLITS = ("fit", "held")


def layouts_of(source: Identity, target: Identity, sources: str, reach: float) -> tuple[Layout, ...]:
    """Keys and values apart, or, where both sides of the source serve both of the target, together."""
    if sources == "both":
        return (plan_layout(source, target, SIDES, SIDES, reach=reach),)
    if sources != "same":
        raise InvalidInput(f'sources are {sources!r}: "same" (keys from keys) and "both" (from keys and values) are')
    return tuple(plan_layout(source, target, (side,), (side,), reach=reach) for side in SIDES)


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows that wait until there are enough of them to be multiplied."""

    x: list[Tensor] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    count: int = 0


class Calibration:
    """Moments of pairs of caches, as both models run; holds no cache once a call returns, but up to `ROWS` rows.

    Args:
        source, target: the two models.
        rotaries: of the source's layers, and of the target's.
        recipe: ``sources``, ``strip``, ``native_prefix`` and ``variant`` say what is taken in.
        stride: every so many-th token is taken.
        reach: see `plan_layout`.

    Raises:
        IncompatibleIdentity: the two are no matched-KV pair; names every reason.
    """

    def __init__(
        self,
        source: Identity,
        target: Identity,
        rotaries: tuple[Sequence[Rotary], Sequence[Rotary]],
        recipe: Recipe,
        *,
        stride: int = 4,
        reach: float = 1.0,
    ):
        require_pair(source, target)
        if stride < 1:
            raise InvalidInput(f"a stride of {stride} tokens: at least 1")
        self.source, self.target, self.recipe, self.stride, self.reach = source, target, recipe, stride, reach
        self.rotaries = tuple(rotaries[0]), tuple(rotaries[1])
        self.layouts = layouts_of(source, target, recipe.sources, reach)
        self.moments = {split: [Moments.empty(layout) for layout in self.layouts] for split in SPLITS}
        self._rows = {split: [_Rows() for _ in self.layouts] for split in SPLITS}
        self.spent = {"models": 0.0, "whole": 0.0}
        """Seconds that it took so far, in earlier runs too: of the two models, and in all."""

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens taken in so far, to fit and held."""
        return {split: self.moments[split][0].count + self._rows[split][0].count for split in SPLITS}

    @property
    def nbytes(self) -> int:
        """Bytes of all moments: the same for any number of tokens."""
        return sum(moments.nbytes for split in SPLITS for moments in self.moments[split])

    def add(self, source: Snapshot, target: Snapshot, *, held: bool = False, offset: int = 0) -> None:
        """Take in two caches of the same tokens, one sequence each.

        Args:
            source, target: from the two models.
            held: to choose by, not to fit on.
            offset: shifts which tokens a stride takes; the number of the sequence, say.

        Raises:
            IncompatibleIdentity: caches of other models, or of different tokens.
            InvalidInput: a batch of several sequences, or entries that are not finite.
        """
        source.identity.require_compatible(self.source, "this cache is not of the source")
        target.identity.require_compatible(self.target, "this cache is not of the target")
        if source.batch_size != 1 or source.seq_len != target.seq_len:
            raise InvalidInput("calibration takes one sequence at a time, the same for both models")
        source.require_prefix_of(target.token_ids)
        split = SPLITS[int(held)]
        for place, _ in enumerate(self.layouts):
            made = self._rows_of(source, target, place, offset)
            if made is None:
                continue
            rows = self._rows[split][place]
            rows.x.append(made[0])
            rows.y.append(made[1])
            rows.count += len(made[0])
            if rows.count >= ROWS:
                self._flush(split, place)

    def centre(self, source: Snapshot, target: Snapshot) -> None:
        """Choose what sums are taken about, from two caches that are like those to come (see `Moments.centre`)."""
        if any(self.tokens.values()):
            return
        for place, _ in enumerate(self.layouts):
            rows = self._rows_of(source, target, place, 0)
            if rows is not None:
                for split in SPLITS:
                    self.moments[split][place].centre(rows[0].mean(dim=0), rows[1].mean(dim=0))

    def _rows_of(self, source: Snapshot, target: Snapshot, place: int, offset: int) -> tuple[Tensor, Tensor] | None:
        layout, recipe = self.layouts[place], self.recipe
        first = max(recipe.native_prefix, first_held(source, layout.sources), first_held(target, layout.targets))
        tokens = torch.arange(first + offset % self.stride, source.seq_len, self.stride)
        tokens = tokens[source.mask[0, tokens].cpu()]
        if not tokens.numel():
            return None
        x = block_rows(source, self.rotaries[0] if recipe.strip else None, layout.sources, tokens)
        # What is not put back on at the end must not be taken off the target's keys here.
        y = block_rows(target, self.rotaries[1] if recipe.reapply else None, layout.targets, tokens)
        return (
            torch.cat([x[block][0].cpu() for block in layout.sources], dim=1),
            torch.cat([y[block][0].cpu() for block in layout.targets], dim=1),
        )

    def _flush(self, split: str, place: int) -> None:
        rows = self._rows[split][place]
        if rows.count:
            self._rows[split][place] = _Rows()
            self.moments[split][place].add(torch.cat(rows.x), torch.cat(rows.y))

    def flush(self) -> None:
        """Multiply the rows that still wait."""
        for split in SPLITS:
            for place in range(len(self.layouts)):
                self._flush(split, place)

    def merge(self, other: Calibration) -> None:
        """Add another's tokens. Raises `IncompatibleIdentity` where it is of another fit."""
        self.flush()
        other.flush()
        for split in SPLITS:
            for mine, theirs in zip(self.moments[split], other.moments[split], strict=True):
                mine.merge(theirs)

    def all_reduce(self, group: Any = None) -> None:
        """Sum over the ranks of a `torch.distributed` group; all then hold the same. See `distributed.all_reduce`."""
        self.flush()
        for split in SPLITS:
            for moments in self.moments[split]:
                all_reduce(moments, group)

    def save(self, folder: str | os.PathLike[str], done: int, of: str) -> None:
        """Put the moments on disk: sequences ``0 … done - 1`` of the text named ``of`` are in them.

        Files of two generations take turns, and the last one written, whole or not at all, says which to read.
        """
        from kvferry.snapshot.files import write_text

        self.flush()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.safetensors"):
            if not old.name.startswith(_generation(done, of)) and not _current(path, old.name):
                old.unlink()
        for split in SPLITS:
            for place, moments in enumerate(self.moments[split]):
                moments.save(path / f"{_generation(done, of)}-{split}-{place}.safetensors")
        write_text(path / _STATE, json.dumps({"done": done, "of": of, "fit": self.digest, "spent": self.spent}))
        for old in path.glob("*.safetensors"):
            if not _current(path, old.name):
                old.unlink()

    def load(self, folder: str | os.PathLike[str], of: str) -> int:
        """Go on from `save`: the number of sequences that are in; 0 where nothing was saved.

        Raises:
            IncompatibleIdentity: the folder holds moments of another fit or text.
            CorruptPacket: damaged files.
        """
        state = _read_state(Path(folder))
        if state is None:
            return 0
        done, text, fit, spent = state
        if (text, fit) != (of, self.digest):
            raise IncompatibleIdentity(
                f"{folder} holds the moments of another fit: name another folder, or remove it",
                {"text": (text, of), "fit": (fit, self.digest)},
            )
        for split in SPLITS:
            for place, layout in enumerate(self.layouts):
                path = Path(folder) / f"{_generation(done, of)}-{split}-{place}.safetensors"
                self.moments[split][place] = Moments.load(path, layout)[0]
        self.spent = spent
        return done

    @property
    def digest(self) -> str:
        """Names models, recipe and layout: all but the text."""
        import hashlib

        settings = [self.source.weights, self.source.dtype, self.target.weights, self.target.dtype, self.stride]
        settings += [self.recipe.sources, self.recipe.strip, self.recipe.reapply, self.recipe.native_prefix]
        settings += [layout.digest for layout in self.layouts]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def place_of(self, side: Side) -> tuple[int, list[int]]:
        """Which layout holds the targets of a side, and where they are in it."""
        for place, layout in enumerate(self.layouts):
            mine = [index for index, block in enumerate(layout.targets) if block.side == side]
            if mine:
                return place, mine
        raise AssertionError(side)


_STATE = "state.json"


def _generation(done: int, of: str) -> str:
    return f"{of[:8]}-{done}"


def _current(folder: Path, name: str) -> bool:
    state = _read_state(folder)
    return state is not None and name.startswith(f"{_generation(state[0], state[1])}-")


def _read_state(folder: Path) -> tuple[int, str, str, dict[str, float]] | None:
    from kvferry.snapshot.strict_json import parse_json

    path = folder / _STATE
    if not path.is_file():
        return None
    match parse_json(path.read_text(encoding="utf-8", errors="replace"), "the state of a fit"):
        case {
            "done": int(done),
            "of": str(of),
            "fit": str(fit),
            "spent": {"models": float(models), "whole": float(whole)},
        } if done >= 0:
            return done, of, fit, {"models": models, "whole": whole}
    raise CorruptPacket(f"{path} is no state of a fit: remove the folder")
