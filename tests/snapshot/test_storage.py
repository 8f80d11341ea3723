"""Snapshots on disk: bit-exact, readable by safetensors, whole after a kill, refused when contradictory."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, UnsupportedVersion
from kvferry.snapshot import FULL, LayerKind, Snapshot
from kvferry.snapshot.container import peek, read_container, write_container
from kvferry.snapshot.storage import load_snapshot
from tests.snapshot.builders import SLIDING, assert_same_snapshot, make_snapshot
from tests.snapshot.killed_writer import version

SHARED = LayerKind("shared", 0)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from([FULL, SLIDING, SHARED, LayerKind("sliding", 2)]), max_size=4),
    batch=st.integers(1, 3),
    seq_len=st.integers(0, 20),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    heads=st.sampled_from([0, 2, 4]),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strided=st.booleans(),
    bits=st.integers(0, 2**32),
    mapped=st.booleans(),
)
def test_round_trip(tmp_path, kinds, batch, seq_len, dtype, heads, dims, strided, bits, mapped):
    snapshot = make_snapshot(
        [FULL, *kinds],
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        heads=heads,
        head_dim=dims[0],
        value_head_dim=dims[1],
        model="ünïcode \ud800 model",
        seed=bits,
    )
    snapshot = replace(snapshot, layers=tuple(with_random_bits(layer, bits, strided) for layer in snapshot.layers))
    size = snapshot.save(tmp_path / "s")
    assert size == (tmp_path / "s").stat().st_size
    assert_same_snapshot(load_snapshot(tmp_path / "s", mapped=mapped), snapshot)


def with_random_bits(layer, seed, strided):
    """Keys of random bits (NaNs with payloads, infinities, subnormals), perhaps as a view of a transposed tensor."""
    if layer.keys is None or layer.keys.numel() == 0:
        return layer
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, dim = layer.keys.shape
    raw = torch.randint(0, 256, (batch, tokens, heads, dim * layer.keys.itemsize), generator=generator)
    keys = raw.to(torch.uint8).view(layer.keys.dtype).transpose(1, 2)
    return replace(layer, keys=keys if strided else keys.contiguous())


def test_crops_and_selections_are_saved_as_what_they_are(tmp_path):
    snapshot = make_snapshot((FULL, LayerKind("shared", 0)), batch=3, seq_len=12, heads=2)
    part = snapshot.crop(7).select(slice(0, 3, 2))
    part.save(tmp_path / "s")
    assert_same_snapshot(Snapshot.load(tmp_path / "s"), part)


def test_any_safetensors_reader_opens_it(tmp_path):
    snapshot = make_snapshot((FULL, SLIDING), batch=2, seq_len=11, dtype="bfloat16", heads=4)
    snapshot.save(tmp_path / "s")
    with safe_open(tmp_path / "s", framework="pt") as file:
        assert set(file.keys()) == {
            "token_ids",
            "positions",
            "mask",
            *(f"layers.{i}.{part}" for i in range(2) for part in ("keys", "values", "queries")),
        }
        for name in ("token_ids", "positions", "mask"):
            assert torch.equal(file.get_tensor(name), getattr(snapshot, name))
        for index, layer in enumerate(snapshot.layers):
            for part in ("keys", "values", "queries"):
                assert torch.equal(file.get_tensor(f"layers.{index}.{part}"), getattr(layer, part))
        metadata = file.metadata()
    assert metadata["kind"] == "snapshot"
    assert json.loads(metadata["identity"])["model"] == "toy"
    assert json.loads(metadata["layers"]) == [["full", 11], ["sliding(8)", 11]]


def test_a_loaded_snapshot_can_be_written_to_without_touching_the_file(tmp_path):
    snapshot = make_snapshot()
    snapshot.save(tmp_path / "s")
    loaded = Snapshot.load(tmp_path / "s")
    loaded.layers[0].keys.zero_()
    assert_same_snapshot(Snapshot.load(tmp_path / "s"), snapshot)
    loaded.save(tmp_path / "s")
    assert Snapshot.load(tmp_path / "s").layers[0].keys.count_nonzero() == 0


def test_limits_and_other_kinds(tmp_path):
    size = make_snapshot().save(tmp_path / "s")
    assert Snapshot.load(tmp_path / "s", max_bytes=size).seq_len == 5
    with pytest.raises(TooLarge):
        Snapshot.load(tmp_path / "s", max_bytes=size - 1)
    with pytest.raises(InvalidInput, match="missing"):
        Snapshot.load(tmp_path / "missing")
    write_container(tmp_path / "p", "packet", {}, {})
    with pytest.raises(CorruptPacket, match="holds a packet, not a snapshot"):
        Snapshot.load(tmp_path / "p")


def test_queries_that_do_not_fit_are_not_written(tmp_path):
    snapshot = make_snapshot(batch=2, kv_heads=2, head_dim=4)
    for shape in ((2, 4, 3), (1, 4, 3, 4), (2, 3, 3, 4), (2, 0, 3, 4), (2, 4, 3, 5)):
        layers = (replace(snapshot.layers[0], queries=torch.zeros(shape)), snapshot.layers[1])
        with pytest.raises(InvalidInput, match="layer 0: queries"):
            replace(snapshot, layers=layers).save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def edit(path, change):
    """Rewrite a snapshot's file, with right checksums, after ``change(tensors, metadata)``."""
    found = read_container(path)
    tensors, metadata = dict(found.tensors), dict(found.metadata)
    change(tensors, metadata)
    write_container(path, found.kind, tensors, metadata)


def change_identity(**fields):
    def change(_, metadata):
        metadata["identity"] = json.dumps({**json.loads(metadata["identity"]), **fields})

    return change


def change_geometry(**fields):
    def change(_, metadata):
        identity = json.loads(metadata["identity"])
        identity["geometries"][0].update(fields)
        metadata["identity"] = json.dumps(identity)

    return change


def change_layers(text):
    return lambda _, metadata: metadata.update(layers=text)


def change_tensor(name, function):
    return lambda tensors, _: tensors.update({name: function(tensors[name])})


CONTRADICTIONS = {
    "no identity": lambda _, metadata: metadata.pop("identity"),
    "no layers": lambda _, metadata: metadata.pop("layers"),
    "more metadata": lambda _, metadata: metadata.update(more="1"),
    "identity is no JSON": lambda _, metadata: metadata.update(identity="{"),
    "identity is a list": lambda _, metadata: metadata.update(identity="[]"),
    "identity nests": lambda _, metadata: metadata.update(identity="[" * 5000),
    "identity is wide": lambda _, metadata: metadata.update(identity="[" + "[]," * 200_000 + "[]]"),
    "dtype": change_identity(dtype="float16"),
    "dtype of no cache": change_identity(dtype="int8"),
    "fewer layers": change_identity(layers=[0]),
    "more layers": change_identity(layers=[0, 0, 0]),
    "no layers at all": change_identity(layers=[]),
    "kv heads": change_geometry(kv_heads=1),
    "head dim": change_geometry(head_dim=8),
    "value head dim": change_geometry(value_head_dim=1),
    "kind in the identity": change_geometry(kind="sliding(8)"),
    "unknown kind": change_geometry(kind="spiral"),
    "rope": change_geometry(rope={"type": "default", "theta": 10**400, "partial": 1, "scaling": {}}),
    "layers no JSON": change_layers("nope"),
    "layers no list": change_layers("{}"),
    "one layer short": change_layers('[["full",5]]'),
    "kind in the list": change_layers('[["full",5],["sliding(8)",5]]'),
    "unknown kind in the list": change_layers('[["full",5],["flat",5]]'),
    "seen too few": change_layers('[["full",5],["full",4]]'),
    "seen negative": change_layers('[["full",5],["full",-5]]'),
    "seen true": change_layers('[["full",5],["full",true]]'),
    "seen huge": change_layers('[["full",5],["full",9007199254740993]]'),
    "layer of three": change_layers('[["full",5],["full",5,5]]'),
    "shared, with tensors": change_layers('[["full",5],["shared(0)",5]]'),
    "missing keys": lambda tensors, _: tensors.pop("layers.1.keys"),
    "missing values": lambda tensors, _: tensors.pop("layers.0.values"),
    "missing mask": lambda tensors, _: tensors.pop("mask"),
    "missing token ids": lambda tensors, _: tensors.pop("token_ids"),
    "extra tensor": lambda tensors, _: tensors.update(extra=torch.zeros(1)),
    "extra layer": lambda tensors, _: tensors.update({"layers.2.keys": torch.zeros(1)}),
    "renamed tensor": lambda tensors, _: tensors.update({"layers.01.keys": tensors.pop("layers.1.keys")}),
    "keys of another shape": change_tensor("layers.0.keys", lambda keys: keys.reshape(1, 2, 4, 5)),
    "keys flat": change_tensor("layers.0.keys", torch.flatten),
    "keys of another dtype": change_tensor("layers.0.keys", torch.Tensor.half),
    "a token short": change_tensor("token_ids", lambda ids: ids[:, :4]),
    "token ids as floats": change_tensor("token_ids", torch.Tensor.float),
    "positions as int32": change_tensor("positions", torch.Tensor.int),
    "mask as bytes": change_tensor("mask", torch.Tensor.byte),
    "queries flat": change_tensor("layers.0.queries", torch.flatten),
    "queries of integers": change_tensor("layers.0.queries", torch.Tensor.long),
    "queries of another dtype": change_tensor("layers.0.queries", torch.Tensor.half),
    "queries of too few heads": change_tensor("layers.0.queries", lambda queries: queries[:, :3]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_well_signed_file_that_contradicts_itself_is_refused(tmp_path, case):
    path = tmp_path / "s"
    make_snapshot(heads=4).save(path)
    edit(path, lambda tensors, metadata: None)
    assert Snapshot.load(path).seq_len == 5
    edit(path, CONTRADICTIONS[case])
    peek(path)
    with pytest.raises(CorruptPacket, match=str(path)):
        Snapshot.load(path)


@pytest.mark.parametrize("kind", ["chunked(64)", "latent", "cross", "recurrent"])
def test_kinds_that_are_not_carried_yet_are_refused_by_name(tmp_path, kind):
    path = tmp_path / "s"
    make_snapshot((FULL,)).save(path)
    edit(path, change_geometry(kind=kind))
    edit(path, change_layers(f'[["{kind}",5]]'))
    with pytest.raises(UnsupportedVersion, match=kind.partition("(")[0]):
        Snapshot.load(path)


@pytest.mark.parametrize("stop", [True, False], ids=["before the rename", "anywhere"])
def test_a_killed_writer_leaves_a_whole_file(tmp_path, stop):
    path = tmp_path / "s"
    command = [sys.executable, "-m", "tests.snapshot.killed_writer", str(path), *(["stop"] if stop else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline() == b"ready\n"
            if not stop:
                time.sleep(0.1)  # any moment will do
        finally:
            writer.send_signal(signal.SIGKILL)
    loaded = Snapshot.load(path)
    if stop:
        assert len(list(tmp_path.iterdir())) == 2, "the kill came while the new file was being written"
        assert_same_snapshot(loaded, version(1))
    else:
        first = torch.equal(loaded.token_ids, version(1).token_ids)
        assert_same_snapshot(loaded, version(1 if first else 2))
