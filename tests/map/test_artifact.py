"""A mapper comes back from its folder as it was, and nothing else is taken for one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvferry.errors import CorruptPacket, InvalidInput, KVFerryError, ModelUnavailable, TooLarge, UnsupportedVersion
from kvferry.map.artifact import CARD, CONFIG, WEIGHTS
from kvferry.map.mapper import Mapper
from kvferry.snapshot.container import read_container, write_container
from tests.hf import tiny
from tests.map import builders
from tests.map.test_mapper import same_bits


@pytest.fixture(scope="module")
def mapper() -> Mapper:
    return builders.pair()[2]


@pytest.fixture
def folder(mapper: Mapper, tmp_path: Path) -> Path:
    mapper.save_pretrained(tmp_path / "mapper")
    return tmp_path / "mapper"


def test_it_comes_back(mapper: Mapper, folder: Path) -> None:
    back = Mapper.from_pretrained(folder)
    assert back.digest == mapper.digest
    assert (back.recipe, back.source, back.target) == (mapper.recipe, mapper.source, mapper.target)
    assert back.measures == mapper.measures
    snapshot = builders.cached(builders.pair()[0], tiny.prompt(1, 77, seed=2))
    assert same_bits(back.map(snapshot), mapper.map(snapshot))
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, CONFIG, CARD}
    config = json.loads((folder / CONFIG).read_text())
    assert config["digest"] == mapper.digest
    assert config["recipe"]["top_k"] == 2
    assert config["source"]["weights"] == mapper.source.weights
    assert len(load_file(folder / WEIGHTS)) == 2 * len(mapper.parts) + 2
    card = (folder / CARD).read_text()
    assert mapper.digest in card
    assert "Held-out" in card
    mapper.save_pretrained(str(folder))
    assert Mapper.from_pretrained(str(folder)).digest == mapper.digest


@pytest.mark.parametrize("name", [CONFIG, CARD])
def test_a_models_folder_is_not_written_into(mapper: Mapper, tmp_path: Path, name: str) -> None:
    """Both have a config.json: the model's would be lost."""
    (tmp_path / name).write_text("of a model")
    with pytest.raises(InvalidInput, match="no mapper's: name another folder"):
        mapper.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "of a model"


def test_other_weights_are_another_mapper(mapper: Mapper) -> None:
    part = mapper.parts[0]
    changed = replace(part, affine=(part.affine[0] * 1.01, part.affine[1]))
    other = replace(mapper, parts=(changed, *mapper.parts[1:]))
    assert other.digest != mapper.digest
    assert replace(mapper, made={"calibration": "other"}).digest != mapper.digest
    timed = replace(mapper, made={**mapper.made, "fit_seconds": 7.0, "model_seconds": 3.0})
    assert timed.digest == mapper.digest  # how long it took is no part of what it is


def flip(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-3] ^= 4
    (folder / WEIGHTS).write_bytes(raw)


def cut(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-64])


def edit_config(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["source"]["model"] = "another"
    (folder / CONFIG).write_text(json.dumps(config))


def no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def not_json(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"\xff{")


def rewrite(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A whole and consistent folder, of which something was changed by someone who knows the format."""

    def edit(folder: Path) -> None:
        container = read_container(folder / WEIGHTS, mapped=False)
        config, tensors = json.loads(container.metadata["config"]), dict(container.tensors)
        change(config, tensors)
        write_container(folder / WEIGHTS, "mapper", tensors, {"config": json.dumps(config)})
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


def part_of(number: int, **changes: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], object]:
    return lambda config, _: config["parts"][number].update(changes)


@pytest.mark.parametrize(
    "attack",
    [
        flip,
        cut,
        edit_config,
        no_config,
        not_json,
        rewrite(lambda _, tensors: tensors["parts.0.0.bias"].add_(1)),  # under the old digest
        rewrite(lambda _, tensors: tensors["parts.0.0.bias"].fill_(torch.nan)),
        rewrite(lambda _, tensors: tensors.update({"parts.0.0.bias": torch.zeros(3)})),
        rewrite(lambda _, tensors: tensors.update({"parts.0.0.weight": torch.zeros(2, 2, dtype=torch.int8)})),
        rewrite(lambda _, tensors: tensors.pop("parts.1.0.weight")),
        rewrite(lambda _, tensors: tensors.update(more=torch.zeros(1))),
        rewrite(lambda _, tensors: tensors.update({"rotary.source.0.inv_freq": torch.full((99,), 1.0)})),
        rewrite(lambda _, tensors: tensors["rotary.source.0.inv_freq"].fill_(torch.inf)),
        rewrite(lambda config, _: config.update(digest="0" * 64)),
        rewrite(lambda config, _: config.update(extra=1)),
        rewrite(lambda config, _: config.pop("recipe")),
        rewrite(lambda config, _: config["recipe"].update(variant="magic")),
        rewrite(lambda config, _: config["recipe"].update(native_prefix=-1)),
        rewrite(lambda config, _: config["recipe"].update(strip=1)),
        rewrite(lambda config, _: config["target"].update(tokenizer="sha256:other")),
        rewrite(lambda config, _: config.update(measures=[])),
        rewrite(lambda config, _: config.update(parts={})),
        rewrite(part_of(0, sources=[])),
        rewrite(part_of(0, sources=[[99, "keys"]])),
        rewrite(part_of(0, sources=[[0, "queries"]])),
        rewrite(part_of(0, target=[True, "keys"])),
        rewrite(part_of(0, heads=[-1, 2])),
        rewrite(part_of(0, heads=[0, 10**9])),
        rewrite(part_of(0, heads=[0, 1])),
        rewrite(part_of(0, hidden=10**9)),
        rewrite(part_of(0, affine=1)),
        rewrite(lambda config, _: config["rotaries"].update(source={"layers": [0] * 4, "rotations": []})),
        rewrite(lambda config, _: config["rotaries"]["source"]["rotations"][0].update(scale=0)),
        rewrite(lambda config, _: config["rotaries"]["source"]["rotations"][0].update(inv_freq=[1.0])),
        rewrite(lambda config, _: config["rotaries"]["source"]["rotations"][0].update(more=1)),
    ],
)
def test_what_is_no_mapper_is_refused(folder: Path, attack: Callable[[Path], None]) -> None:
    attack(folder)
    with pytest.raises(CorruptPacket):
        Mapper.from_pretrained(folder)


def test_other_ways_to_be_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TooLarge):
        Mapper.from_pretrained(folder, max_bytes=1000)
    rewrite(lambda config, _: config.update(version=99))(folder)
    with pytest.raises(UnsupportedVersion):
        Mapper.from_pretrained(folder)
    for path in (tmp_path, tmp_path / "nothing", folder / CONFIG):
        with pytest.raises(InvalidInput, match="mapper"):
            Mapper.from_pretrained(path)
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE"):
        Mapper.from_pretrained("nobody/nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput):
        builders.pair()[2].save_pretrained(tmp_path / "file")


def test_any_byte_of_the_header_counts(folder: Path, tmp_path: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for place in range(0, 8 + length, 397):
        shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        raw = bytearray(whole)
        raw[place] ^= 1
        (tmp_path / "copy" / WEIGHTS).write_bytes(raw)
        with pytest.raises(KVFerryError):
            Mapper.from_pretrained(tmp_path / "copy")
