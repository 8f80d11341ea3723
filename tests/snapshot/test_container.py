"""Files: valid safetensors, bit-exact, whole or not at all."""

import json
import math
import os
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvferry.errors import CorruptPacket, InvalidInput, TooLarge, UnsupportedVersion
from kvferry.snapshot import container, header
from kvferry.snapshot.container import peek, read_container, write_container
from kvferry.snapshot.header import DTYPES, TensorInfo, plan_header
from tests.attacks.anatomy import sign
from tests.snapshot.builders import same_bits

NAMES = st.text("abcXYZ019_.-", min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def random_tensors(draw):
    """A tensor of any dtype, shape and strides, made of random bits."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(SHAPES)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count))).bool().reshape(shape)
    raw = bytearray(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)))
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and tensor.shape[0] > 1 and draw(st.booleans()):
        tensor = tensor[:: draw(st.sampled_from([1, 2]))]
    return tensor


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(NAMES, random_tensors(), max_size=6),
    metadata=st.dictionaries(st.from_regex(r"[a-c]{1,4}", fullmatch=True), st.text().map(json.dumps), max_size=3),
    mapped=st.booleans(),
)
def test_round_trip_of_every_bit_here_and_in_safetensors(tmp_path, tensors, metadata, mapped):
    path = tmp_path / "file"
    size = write_container(path, "thing", tensors, metadata)
    assert size == path.stat().st_size
    back = read_container(path, kind="thing", mapped=mapped)
    assert (back.kind, dict(back.metadata), back.nbytes) == ("thing", metadata, size)
    assert set(back.tensors) == set(tensors)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        told = file.metadata()
        for name, tensor in tensors.items():
            assert same_bits(back.tensors[name], tensor), name
            assert same_bits(file.get_tensor(name), tensor), name
    assert (told["format"], told["kind"], told["version"]) == ("kvferry", "thing", str(header.VERSION))
    assert set(json.loads(told["checksums"])) == set(tensors)
    assert {key: told[key] for key in metadata} == metadata


def sample(path):
    write_container(
        path, "thing", {"m": torch.tensor([True, False, True]), "x": torch.arange(6.0).reshape(2, 3)}, {"note": "[1]"}
    )
    return path


def test_data_is_aligned_widest_first(tmp_path):
    many = {str(dtype)[6:]: torch.ones(3).to(dtype) for dtype in reversed(DTYPES.values())}
    write_container(tmp_path / "f", "thing", many, {})
    found = peek(tmp_path / "f")
    assert found.payload_start % 8 == 0
    assert all((found.payload_start + info.begin) % info.dtype.itemsize == 0 for info in found.tensors.values())
    widths = [info.dtype.itemsize for info in found.tensors.values()]
    assert widths == sorted(widths, reverse=True)


def test_bytes_become_uint8(tmp_path):
    values = {"a": b"abc", "b": bytearray(b"\x00\xff"), "c": memoryview(np.arange(3, dtype=np.int16)), "d": b""}
    write_container(tmp_path / "f", "thing", values, {})
    back = read_container(tmp_path / "f").tensors
    assert {name: bytes(tensor.numpy()) for name, tensor in back.items()} == {k: bytes(v) for k, v in values.items()}
    assert {tensor.dtype for tensor in back.values()} == {torch.uint8}


def test_writing_is_deterministic(tmp_path):
    assert sample(tmp_path / "a").read_bytes() == sample(tmp_path / "b").read_bytes()


def test_peek_reads_the_header_alone(tmp_path):
    path = sample(tmp_path / "f")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = peek(path)
    assert (found.kind, dict(found.metadata), found.nbytes) == ("thing", {"note": "[1]"}, len(data))
    assert found.tensors["x"] == TensorInfo(torch.float32, (2, 3), 0, 24, found.tensors["x"].checksum)
    with pytest.raises(CorruptPacket, match="'m' does not match its checksum"):
        read_container(path)


@pytest.mark.parametrize("mapped", [True, False])
def test_tensors_share_one_private_buffer(tmp_path, mapped):
    path = sample(tmp_path / "f")
    before = path.read_bytes()
    tensors = read_container(path, mapped=mapped).tensors
    start = peek(path).payload_start
    base = {tensor.untyped_storage().data_ptr() + 0 for tensor in tensors.values()}
    assert max(base) - min(base) == 24, "the tensors lie in the buffer as in the file"
    assert start == len(before) - 27
    tensors["x"].fill_(7)
    assert path.read_bytes() == before
    assert torch.equal(read_container(path).tensors["x"], torch.arange(6.0).reshape(2, 3))


def test_a_reader_keeps_the_file_that_it_opened(tmp_path):
    path = tmp_path / "f"
    write_container(path, "thing", {"x": torch.zeros(100_000)}, {})
    old = read_container(path).tensors["x"]
    write_container(path, "thing", {"x": old[:3] + 1}, {})
    assert old.count_nonzero() == 0
    assert torch.equal(read_container(path).tensors["x"], torch.ones(3))
    write_container(path, "thing", {"x": read_container(path).tensors["x"]}, {})
    path.unlink()
    assert old.count_nonzero() == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_edited_while_it_is_read_is_refused(tmp_path, monkeypatch, mapped):
    path = sample(tmp_path / "f")
    real = container._tensors

    def slow(*args):
        found = real(*args)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(container, "_tensors", slow)
    with pytest.raises(CorruptPacket, match="changed while"):
        read_container(path, mapped=mapped)


def test_limits_kinds_and_versions(tmp_path, monkeypatch):
    path = sample(tmp_path / "f")
    size = path.stat().st_size
    assert read_container(path, max_bytes=size).nbytes == size
    for reader in (read_container, peek):
        with pytest.raises(TooLarge, match=str(size)):
            reader(path, max_bytes=size - 1)
    with pytest.raises(CorruptPacket, match="holds a thing, not a packet"):
        read_container(path, kind="packet")
    monkeypatch.setattr(header, "VERSION", 2)
    with pytest.raises(UnsupportedVersion, match="format 1"):
        read_container(path)


def test_paths_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", "fifo", "loop", "missing/deeper", "a" * 300, "nul\0"):
        for reader in (read_container, peek):
            with pytest.raises(InvalidInput, match=r"cannot read|no regular file"):
                reader(tmp_path / name)
    with pytest.raises(InvalidInput, match=str(tmp_path)):
        read_container(tmp_path)


def test_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing/file", "file/file", "folder", "fifo", "a" * 300 + "/x"):
        with pytest.raises(InvalidInput):
            write_container(tmp_path / name, "thing", {}, {})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["fifo", "file", "folder"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "store").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "store" / "real")
    sample(link)
    assert link.is_symlink()
    assert read_container(tmp_path / "store" / "real").kind == "thing"


def test_the_file_has_the_permissions_that_the_umask_gives(tmp_path):
    old = os.umask(0o027)
    try:
        sample(tmp_path / "f")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
@pytest.mark.parametrize("place", ["_write_all", "_write_source", "render_header", "os.fsync", "Path.replace"])
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure, place):
    path = sample(tmp_path / "f")
    before = path.read_bytes()

    def fail(*args):
        raise failure if isinstance(failure, type) else OSError(*failure.args)

    target = {"os.fsync": (os, "fsync"), "Path.replace": (Path, "replace")}.get(place, (container, place))
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(failure if isinstance(failure, type) else type(failure)) as caught:
            write_container(path, "thing", {"x": torch.zeros(9)}, {})
        if isinstance(caught.value, OSError):
            assert caught.value.filename == str(path)  # a full disk has no name of its own
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_data_reach_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.replace

    def note_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def note_rename(self, target):
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_rename)
    size = write_container(tmp_path / "f", "thing", {"x": torch.zeros(9)}, {})
    assert events == [f"file of {size}", "rename", "folder"]


def test_booleans_are_0_or_1(tmp_path):
    """Another byte would be True for some operations of torch and not for others."""
    write_container(tmp_path / "f", "thing", {"m": torch.tensor([1, 0, 2], dtype=torch.uint8)}, {})
    data = (tmp_path / "f").read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
    (tmp_path / "f").write_bytes(sign(text.rstrip().replace('"U8"', '"BOOL"'), data[-3:]))
    with pytest.raises(CorruptPacket, match="other bytes than 0 and 1"):
        read_container(tmp_path / "f")


SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("kind", "tensors", "metadata"),
    [
        ("", {}, {}),
        ("Thing", {}, {}),
        ("a" * 33, {}, {}),
        ("thing", {"": torch.zeros(1)}, {}),
        ("thing", {'a"b': torch.zeros(1)}, {}),
        ("thing", {"ü": torch.zeros(1)}, {}),
        ("thing", {"a" * 257: torch.zeros(1)}, {}),
        ("thing", {"__metadata__": torch.zeros(1)}, {}),
        ("thing", {"x": torch.zeros(1, dtype=torch.complex64)}, {}),
        ("thing", {"x": torch.zeros([1] * 9)}, {}),
        ("thing", {"x": torch.zeros(1, device="meta")}, {}),
        ("thing", {"x": SPARSE}, {}),
        ("thing", {"x": "text"}, {}),
        ("thing", {"x": memoryview(b"abcd")[::2]}, {}),
        ("thing", {}, {"Upper": ""}),
        ("thing", {}, {"digest": "0" * 32}),
        ("thing", {}, {"format": "pt"}),
        ("thing", {}, {"note": "ü"}),
        ("thing", {}, {"note": 3}),
        ("thing", {}, {"checksums": "{}"}),
        ("thing", {}, {f"k{i}": "" for i in range(1025)}),
        ("thing", {}, {"note": "x" * (2 << 20)}),
        ("thing", {f"t{i}": b"" for i in range(2000)}, {}),
    ],
)
def test_what_has_no_place_in_a_file_is_refused(tmp_path, kind, tensors, metadata):
    with pytest.raises(InvalidInput):
        write_container(tmp_path / "f", kind, tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def test_the_size_is_known_ahead(tmp_path):
    tensors = {"x": torch.zeros(3, 5, dtype=torch.bfloat16), "y": torch.zeros(7, dtype=torch.uint8)}
    plan = plan_header("thing", {name: (t.dtype, t.shape) for name, t in tensors.items()}, {"note": "n"})
    assert plan.nbytes == write_container(tmp_path / "f", "thing", tensors, {"note": "n"})


def memory(field: str) -> int:
    """Bytes of this process by /proc: ``VmRSS`` now, ``VmHWM`` at its highest since the mark was reset."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_strided_tensors_are_copied_one_at_a_time(tmp_path):
    size = 32 << 20
    tensors = {f"t{i}": torch.full((1,), i, dtype=torch.uint8).expand(size) for i in range(6)}
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    write_container(tmp_path / "f", "thing", tensors, {})
    assert memory("VmHWM") - before < 2 * size
    assert [int(t[-1]) for t in read_container(tmp_path / "f").tensors.values()] == list(range(6))


@pytest.mark.parametrize("count", [1_000, 8_000])
def test_as_many_tensors_as_there_may_be_take_little_space(tmp_path, count):
    tensors = {f"t{i}": bytes(0 if count < 1_024 else 1_024) for i in range(count)}
    size = write_container(tmp_path / "f", "thing", tensors, {})
    tracemalloc.start()
    assert len(read_container(tmp_path / "f").tensors) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 2 * size + (1 << 20)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_is_found(tmp_path, data):
    good = (tmp_path / "good").read_bytes() if (tmp_path / "good").exists() else sample(tmp_path / "good").read_bytes()
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    (tmp_path / "bad").write_bytes(bad)
    with pytest.raises((CorruptPacket, UnsupportedVersion, TooLarge)):
        read_container(tmp_path / "bad")
