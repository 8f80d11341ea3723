"""The noun's own checks and verbs: crop, select, prefix, clone."""

from dataclasses import replace

import pytest
import torch

from kvferry.errors import IncompatibleIdentity, InvalidInput, UnsupportedCache
from kvferry.snapshot import FULL, LayerKind, Snapshot, dtype_from_name, dtype_name
from tests.snapshot.builders import SLIDING, assert_same_snapshot, make_snapshot, same_bits

SHARED = LayerKind("shared", 1)


def pointers(snapshot: Snapshot) -> set[int]:
    tensors = [snapshot.token_ids, snapshot.positions, snapshot.mask]
    tensors += [t for layer in snapshot.layers for t in (layer.keys, layer.values, layer.queries) if t is not None]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_sizes():
    snapshot = make_snapshot((FULL, SLIDING, SHARED), batch=2, seq_len=20, dtype="bfloat16", value_head_dim=3)
    assert (snapshot.batch_size, snapshot.seq_len, snapshot.dtype) == (2, 20, torch.bfloat16)
    assert snapshot.nbytes == 2 * 2 * (20 + 7) * (4 + 3) * 2


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_dtype_names(name):
    assert dtype_name(dtype_from_name(name)) == name


@pytest.mark.parametrize("name", ["int8", "bool", "float", "Float32", "", "nn"])
def test_other_names_are_no_dtype_of_a_cache(name):
    with pytest.raises(InvalidInput):
        dtype_from_name(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": torch.zeros(5, dtype=torch.int64)},
        {"token_ids": torch.zeros(1, 5, dtype=torch.int32)},
        {"positions": torch.zeros(1, 4, dtype=torch.int64)},
        {"positions": torch.zeros(1, 5)},
        {"mask": torch.ones(1, 5)},
        {"mask": torch.ones(2, 5, dtype=torch.bool)},
        {"layers": ()},
        {"layers": make_snapshot((FULL, SLIDING)).layers},
        {"layers": make_snapshot(head_dim=6).layers},
        {"layers": make_snapshot(kv_heads=1).layers},
        {"layers": make_snapshot(value_head_dim=6).layers},
        {"layers": make_snapshot(dtype="float16").layers},
        {"layers": make_snapshot(seq_len=4).layers},
        {"layers": make_snapshot(batch=2).layers},
    ],
)
def test_parts_that_do_not_fit_are_refused(changes):
    with pytest.raises(InvalidInput):
        replace(make_snapshot(), **changes)


def test_a_clone_is_equal_and_shares_nothing():
    snapshot = make_snapshot((FULL, SLIDING, SHARED), batch=2, seq_len=12, heads=4)
    clone = snapshot.clone()
    assert_same_snapshot(clone, snapshot)
    assert not pointers(clone) & pointers(snapshot)


def test_crop_keeps_the_first_tokens_and_shares_storage():
    snapshot = make_snapshot((FULL, LayerKind("shared", 0)), batch=2, seq_len=12, heads=2)
    short = snapshot.crop(5)
    assert short.seq_len == 5
    assert torch.equal(short.token_ids, snapshot.token_ids[:, :5])
    assert torch.equal(short.positions, snapshot.positions[:, :5])
    assert torch.equal(short.mask, snapshot.mask[:, :5])
    assert torch.equal(short.layers[0].keys, snapshot.layers[0].keys[:, :, :5])
    assert torch.equal(short.layers[0].values, snapshot.layers[0].values[:, :, :5])
    assert {layer.seen for layer in short.layers} == {5}
    assert short.layers[0].queries is None, "the last queries of the whole prompt are not those of its beginning"
    assert pointers(short) <= pointers(snapshot)
    whole = snapshot.crop(12)
    assert_same_snapshot(whole, snapshot)


def test_crop_of_a_sliding_layer_that_has_not_slid():
    snapshot = make_snapshot((SLIDING,), seq_len=7)
    assert torch.equal(snapshot.crop(4).layers[0].keys, snapshot.layers[0].keys[:, :, :4])


def test_crop_of_a_sliding_layer_that_forgot_what_is_needed():
    snapshot = make_snapshot((FULL, SLIDING), seq_len=20)
    assert snapshot.crop(20).layers[1].held == 7
    with pytest.raises(UnsupportedCache, match=r"layer 1 .*13…19.* from 12 on"):
        snapshot.crop(19)


@pytest.mark.parametrize("length", [0, -1, 6])
def test_crop_out_of_range(length):
    with pytest.raises(InvalidInput):
        make_snapshot(seq_len=5).crop(length)


@pytest.mark.parametrize("rows", [[1], (2, 0), [-1], [0, 0], slice(1, 3), slice(None, None, 2)])
def test_select_takes_rows_in_order(rows):
    snapshot = make_snapshot((FULL, SLIDING, SHARED), batch=3, seq_len=10, heads=2)
    picked = snapshot.select(rows)
    rows = rows if isinstance(rows, slice) else list(rows)
    assert torch.equal(picked.token_ids, snapshot.token_ids[rows])
    assert torch.equal(picked.positions, snapshot.positions[rows])
    assert torch.equal(picked.mask, snapshot.mask[rows])
    for have, was in zip(picked.layers[:2], snapshot.layers[:2], strict=True):
        assert same_bits(have.keys, was.keys[rows])
        assert same_bits(have.values, was.values[rows])
        assert same_bits(have.queries, was.queries[rows])
    assert picked.layers[2].keys is None
    if isinstance(rows, slice):
        assert pointers(picked) <= pointers(snapshot)


@pytest.mark.parametrize(
    "rows", [[], [3], [-4], slice(3, 9), slice(2, 1), 0, None, "0", [0.5], slice("a", None), slice(0, 3, 0)]
)
def test_select_of_rows_that_are_not_there(rows):
    with pytest.raises(InvalidInput):
        make_snapshot(batch=3).select(rows)


def test_prefix_checks():
    snapshot = make_snapshot(seq_len=5)
    ids = snapshot.token_ids
    longer = torch.cat([ids, torch.tensor([[1, 2]])], dim=1)
    for good in (ids, longer, longer[0]):
        assert snapshot.is_prefix_of(good)
        snapshot.require_prefix_of(good)
    other = longer.clone()
    other[0, 3] += 1
    assert not snapshot.is_prefix_of(other)
    with pytest.raises(IncompatibleIdentity) as caught:
        snapshot.require_prefix_of(other)
    assert caught.value.differences == {"token_ids[0, 3]": (int(ids[0, 3]), int(other[0, 3]))}
    with pytest.raises(IncompatibleIdentity) as caught:
        snapshot.require_prefix_of(ids[:, :4])
    assert caught.value.differences == {"seq_len": (5, 4)}
    with pytest.raises(IncompatibleIdentity) as caught:
        snapshot.require_prefix_of(longer.repeat(2, 1))
    assert caught.value.differences == {"batch_size": (1, 2)}


def test_only_models_of_known_libraries_take_a_snapshot():
    with pytest.raises(UnsupportedCache, match="Linear"):
        make_snapshot().to_cache(torch.nn.Linear(1, 1))
