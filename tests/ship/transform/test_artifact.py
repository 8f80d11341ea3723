"""The transform itself: its bases, its groups, its file, and files that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvferry as kv
from kvferry.errors import CorruptPacket, IncompatibleIdentity, InvalidInput, KVFerryError, TooLarge
from kvferry.ship.transform import store
from kvferry.ship.transform.artifact import KIND, Transform
from kvferry.ship.transform.basis import LEVELS
from kvferry.ship.transform.groups import layer_groups
from kvferry.snapshot import FULL, LayerKind
from kvferry.snapshot.container import read_container, write_container
from tests.ship.transform.builders import channels, make_transform
from tests.snapshot.builders import SLIDING, make_identity

KINDS = (FULL, SLIDING, FULL, SLIDING, LayerKind("shared", 0), FULL)


@pytest.fixture(scope="module")
def transform() -> Transform:
    return make_transform(make_identity(KINDS, head_dim=8, value_head_dim=6, dtype="bfloat16"))


def test_groups_cover_keys_and_values_of_every_layer_once() -> None:
    identity = make_identity(KINDS, head_dim=8, value_head_dim=6)
    for width in (1, 12, 32, 33, 10_000):
        groups = layer_groups(identity, width)
        for keys in (True, False):
            layers = [layer for group in groups if group.keys == keys for layer in group.layers]
            assert sorted(layers) == [0, 1, 2, 3, 5]
        for group in groups:
            assert group.width == sum(group.sizes) == len(group.layers) * 2 * (8 if group.keys else 6)
            assert len(group.layers) == 1 or group.width <= width
            assert len({identity.layers[layer].kind for layer in group.layers}) == 1
            assert list(group.layers) == sorted(group.layers)


def test_a_basis_can_be_undone_and_its_first_components_hold_most(transform: Transform) -> None:
    for basis in transform.bases:
        eye = torch.eye(basis.group.width)
        assert (basis.back.double() @ basis.forward.double() - eye).abs().max() < 1e-3
        rows = channels(basis.group, 1000, seed=99)
        components = rows @ basis.forward.T - basis.mean
        deviation = (basis.level.float() / LEVELS).exp2()
        wide = deviation > 0.05 * deviation[0]
        assert wide.sum() > 2
        ratio = components.square().mean(dim=0).sqrt()[wide] / deviation[wide]
        assert ((ratio > 0.7) & (ratio < 1.4)).all()
        assert (deviation[:-1] >= deviation[1:]).all()


def test_save_load_and_the_digest(transform: Transform, tmp_path: Path) -> None:
    size = transform.save(tmp_path / "t")
    assert size == (tmp_path / "t").stat().st_size
    again = Transform.load(tmp_path / "t")
    assert again.digest == transform.digest
    assert len(again.digest) == 32
    assert again.identity == transform.identity
    assert again.made == transform.made
    for one, other in zip(again.bases, transform.bases, strict=True):
        assert one.group == other.group
        assert torch.equal(one.forward, other.forward)
        assert torch.equal(one.level, other.level)
    np.testing.assert_array_equal(again.tables.bank.freq, transform.tables.bank.freq)
    with pytest.raises(TooLarge):
        Transform.load(tmp_path / "t", max_bytes=size - 1)


@pytest.mark.parametrize("part", ["forward", "mean", "spread", "importance", "shift", "rotary", "made"])
def test_the_digest_names_every_part(transform: Transform, part: str) -> None:
    basis, own = transform.bases[1], transform.importance[1]
    if part in ("forward", "mean", "spread"):
        changed = getattr(basis, part).clone()
        changed.view(-1)[0] += 1
        bases = (transform.bases[0], replace(basis, **{part: changed}), *transform.bases[2:])
        other = replace(transform, bases=bases)
    elif part == "importance":
        changed = replace(own, position=own.position + 1)
        other = replace(transform, importance=(transform.importance[0], changed, *transform.importance[2:]))
    elif part == "shift":
        other = replace(transform, tables=replace(transform.tables, shift=transform.tables.shift + 0.25))
    elif part == "rotary":
        first = replace(transform.rotaries[0], scale=1.5)
        other = replace(transform, rotaries=(first, *transform.rotaries[1:]))
    else:
        other = replace(transform, made={"windows": 5})
    assert other.digest != transform.digest
    assert replace(other).digest == other.digest


def test_ways_of_rotating_are_kept(transform: Transform, tmp_path: Path) -> None:
    first = replace(transform.rotaries[0], interleaved=True, limit=99)
    other = replace(transform, rotaries=(first, *transform.rotaries[1:]))
    other.save(tmp_path / "t")
    again = Transform.load(tmp_path / "t")
    assert again.digest == other.digest != transform.digest
    found = [(own.interleaved, own.limit, own.single) for own in again.rotaries]
    assert found == [(True, 99, False), *[(False, None, False)] * 5]
    assert "rotations" not in transform._metadata()["transform"]


Tensors = dict[str, torch.Tensor]
Plain = dict[str, Any]


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Plain], None]:
    def change(tensors: Tensors, plain: Plain) -> None:
        tensors[name] = value(tensors[name].clone())

    return change


def _put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[1] = value
        return tensor

    return change


def _group_twice(tensors: Tensors, plain: Plain) -> None:
    count = len(plain["groups"])
    plain["groups"].append(plain["groups"][0])
    for name in [name for name in tensors if name.startswith("groups.0.")]:
        tensors[name.replace("groups.0.", f"groups.{count}.")] = tensors[name].clone()


def _plain(change: Callable[[Plain], object]) -> Callable[[Tensors, Plain], None]:
    def apply(tensors: Tensors, plain: Plain) -> None:
        change(plain)

    return apply


HOSTILE: dict[str, Callable[[Tensors, Plain], None]] = {
    "a basis of another shape": _set("groups.0.forward", lambda t: t[:-1].contiguous()),
    "a basis in 64 bit": _set("groups.0.back", lambda t: t.double()),
    "NaN in a basis": _set("groups.0.forward", _put(float("nan"))),
    "infinity on the way back": _set("groups.1.back", _put(float("inf"))),
    "NaN in a mean": _set("groups.0.mean", _put(float("nan"))),
    "a mean too long": _set("groups.0.mean", lambda t: torch.cat([t, t])),
    "a level out of range": _set("groups.0.level", _put(2049)),
    "the least level there is": _set("groups.0.level", _put(-(2**15))),
    "levels in 32 bit": _set("groups.0.level", lambda t: t.int()),
    "a spread out of range": _set("groups.2.spread", _put(-3000)),
    "NaN in an importance": _set("groups.0.attention", _put(float("nan"))),
    "an importance of other features": _set("groups.0.position", lambda t: torch.zeros(4)),
    "a negative frequency": _set("rotary.0", _put(-0.1)),
    "NaN in a frequency": _set("rotary.0", _put(float("nan"))),
    "more frequencies than channels": _set("rotary.0", lambda t: torch.ones(40)),
    "tables that do not sum": _set("tables.freq", _put(9)),
    "negative tables": _set("tables.freq", _put(-1)),
    "tables of floats": _set("tables.freq", lambda t: t.float()),
    "a table less": _set("tables.freq", lambda t: t[1:].contiguous()),
    "a reach of nothing": _set("tables.reach", _put(0)),
    "reaches of floats": _set("tables.reach", lambda t: t.float()),
    "a shift less": _set("tables.shift", lambda t: t[1:].contiguous()),
    "NaN in a shift": _set("tables.shift", _put(float("nan"))),
    "a tensor more": lambda tensors, plain: tensors.update(more=torch.zeros(3)),
    "a tensor less": lambda tensors, plain: tensors.__delitem__("groups.0.mean"),
    "a group twice": _group_twice,
    "a group less": _plain(lambda p: p["groups"].pop()),
    "a layer that is not there": _plain(lambda p: p["groups"][0].__setitem__(1, [0, 2, 77])),
    "a negative layer": _plain(lambda p: p["groups"][0].__setitem__(1, [-6, 2, 5])),
    "a layer that is no number": _plain(lambda p: p["groups"][0].__setitem__(1, ["0", 2, 5])),
    "a group of no layers": _plain(lambda p: p["groups"][0].__setitem__(1, [])),
    "layers of two kinds": _plain(lambda p: p["groups"][0].__setitem__(1, [0, 1, 5])),
    "layers that share": _plain(lambda p: p["groups"][0].__setitem__(1, [0, 2, 4])),
    "another width": _plain(lambda p: p["groups"][0].__setitem__(2, [16, 16, 15])),
    "a scale of 0": _plain(lambda p: p["scales"].__setitem__(0, 0)),
    "a scale less": _plain(lambda p: p["scales"].pop()),
    "a way of rotating less": _plain(lambda p: p.__setitem__("rotations", [[False, None, False]] * 5)),
    "a limit of no positions": _plain(lambda p: p.__setitem__("rotations", [[False, 0, False]] * 6)),
    "a limit in words": _plain(lambda p: p.__setitem__("rotations", [[False, "9", False]] * 6)),
    "ways of rotating that are none": _plain(lambda p: p.__setitem__("rotations", 7)),
    "made of nothing": _plain(lambda p: p.__setitem__("made", None)),
    "made of a list": _plain(lambda p: p.__setitem__("made", [])),
    "no groups": _plain(lambda p: p.pop("groups")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_fits_its_checksums_but_not_together(transform: Transform, name: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    transform.save(path)
    container = read_container(path, kind=KIND)
    tensors, plain = dict(container.tensors), json.loads(container.metadata["transform"])
    HOSTILE[name](tensors, plain)
    metadata = {"identity": container.metadata["identity"], "transform": json.dumps(plain)}
    write_container(path, KIND, tensors, metadata)
    with pytest.raises(CorruptPacket) as caught:
        Transform.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_that_is_damaged_or_something_else(transform: Transform, tmp_path: Path) -> None:
    path = tmp_path / "t"
    transform.save(path)
    raw = bytearray(path.read_bytes())
    for place in (3, 200, len(raw) // 2, len(raw) - 1):
        raw[place] ^= 4
        path.write_bytes(raw)
        with pytest.raises(KVFerryError):
            Transform.load(path)
        raw[place] ^= 4
    write_container(path, KIND, {}, {})
    with pytest.raises(CorruptPacket):
        Transform.load(path)
    write_container(path, "snapshot", {"x": torch.zeros(1)}, {})
    with pytest.raises(KVFerryError):
        Transform.load(path)
    with pytest.raises(InvalidInput):
        Transform.load(tmp_path / "nothing")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "transforms"


def test_the_cache_folder_gives_the_newest_of_the_model(transform: Transform, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="ship calibrate"):
        store.for_model(transform.identity)
    first = store.keep(transform)
    assert first == folder / f"{transform.digest}.safetensors"
    second = replace(transform, made={"windows": 9})
    os.utime(first, (1_000, 1_000))
    store.keep(second)
    other = make_transform(make_identity(KINDS, head_dim=8, value_head_dim=6, dtype="bfloat16", weights="v" * 16))
    store.keep(other)
    (folder / "junk.safetensors").write_bytes(b"no transform at all")
    assert store.for_model(transform.identity).digest == second.digest
    assert store.for_model(other.identity).digest == other.digest
    assert store.for_packet(transform.digest).digest == transform.digest
    with pytest.raises(InvalidInput, match="float16"):
        store.for_model(replace(transform.identity, dtype="float16"))


def test_what_is_given_is_taken_and_checked(transform: Transform, folder: Path, tmp_path: Path) -> None:
    transform.save(tmp_path / "t")
    assert store.for_model(transform.identity, tmp_path / "t").digest == transform.digest
    assert store.for_packet(transform.digest, str(tmp_path / "t")).digest == transform.digest
    with pytest.raises(IncompatibleIdentity) as caught:
        store.for_model(replace(transform.identity, weights="v" * 16), transform)
    assert caught.value.differences.keys() >= {"weights"}
    with pytest.raises(IncompatibleIdentity) as caught:
        store.for_packet("0" * 32, transform)
    assert caught.value.differences == {"transform": ("0" * 32, transform.digest)}
    with pytest.raises(InvalidInput, match="no transform can be read"):
        store.for_model(transform.identity, tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="is not here"):
        store.for_packet("0" * 32)
    for digest in (None, 3, "", "../" * 10 + "ab", "0" * 31, "g" * 33, "/" * 32):
        with pytest.raises(CorruptPacket, match="which transform"):
            store.for_packet(digest)


def test_a_transform_put_under_the_name_of_another_is_refused(transform: Transform, folder: Path) -> None:
    path = store.keep(transform)
    other = replace(transform, made={"windows": 1})
    path.rename(folder / f"{other.digest}.safetensors")
    with pytest.raises(IncompatibleIdentity):
        store.for_packet(other.digest)


def test_public_name() -> None:
    assert kv.Transform is Transform
