"""What the codec's benchmark counts and compares."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import InvalidInput
from kvferry.evaluate.bench_codec import Arm, CodecBenchSettings, Unavailable, run, sections, source
from kvferry.evaluate.codec_peers import absmax4, absmax8, restore4, restore8

SMALL = CodecBenchSettings(
    quantizers=("sym4",), dtypes=("float32",), threads=(1,), megabytes=(0.5,), rounds=2, packets=False
)


def test_a_peer_that_cannot_run_is_named_with_its_reason() -> None:
    def absent(x: torch.Tensor) -> list[Arm]:
        raise Unavailable("it needs\n a moon")

    def broken(x: torch.Tensor) -> list[Arm]:
        def fail() -> None:
            raise RuntimeError("no kernel\nlong story")

        return [Arm("broken", "int8", fail, fail, lambda: 0)]

    result = run(SMALL, {"absent": absent, "broken": broken})
    assert result.skipped == [
        {"peer": "absent", "dtype": "float32", "reason": "it needs a moon"},
        {"peer": "broken", "dtype": "float32", "reason": "int8: no kernel"},
    ]
    assert {row.peer for row in result.rows} == {"kvferry"}


def test_a_peer_that_decodes_to_another_shape_does_no_such_work() -> None:
    def cheat(x: torch.Tensor) -> list[Arm]:
        return [Arm("cheat", "int8", lambda: None, lambda: None, lambda: 1, lambda: x[:, :1])]

    assert "not" in run(SMALL, {"cheat": cheat}).skipped[0]["reason"]


def test_a_slow_arm_takes_fewer_samples_and_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    settings = CodecBenchSettings(("sym8",), ("bfloat16",), (2,), (0.5,), rounds=9, seconds=0.0, packets=False)
    rows = run(settings).rows
    assert {row.n for row in rows if row.peer == "kvferry"} == {3}
    assert torch.get_num_threads() == before


def test_the_mixture_holds_every_token_once() -> None:
    x = source(SMALL, 0.5, "float16")
    parts = sections("mixed", x, 3)
    tokens = torch.cat([part.index for part in parts if part.index is not None])
    assert sorted(tokens.tolist()) == list(range(x.shape[1]))
    assert [part.quantizer.spec for part in parts] == ["raw", "sym8", "sym4"]


@pytest.mark.parametrize(("encode", "decode", "bits"), [(absmax8, restore8, 8), (absmax4, restore4, 4)])
def test_what_is_written_by_hand_does_its_work(encode, decode, bits: int) -> None:
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    codes, scale = encode(x)
    assert codes.nbytes == x.numel() * bits // 8
    step = scale.float().expand(2, 64, 32)
    assert ((decode((codes, scale), torch.float32) - x).abs() <= step * 0.6).all()


def test_settings_that_cannot_be() -> None:
    with pytest.raises(InvalidInput):
        CodecBenchSettings(threads=(0,))
    with pytest.raises(InvalidInput, match="sym9"):
        CodecBenchSettings(quantizers=("sym9",))
