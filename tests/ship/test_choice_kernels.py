"""What chooses among quantisers: compiled kernels and torch give the same errors, tiers, bytes and verdicts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.errors import InvalidInput
from kvferry.ship import distortion, native
from kvferry.ship.finite import nonfinite_tokens
from kvferry.ship.plan import plan
from kvferry.ship.policy.optimal import Choice, Ladder, Problem
from kvferry.snapshot import FULL
from tests.ship.builders import unmasked
from tests.snapshot.builders import make_snapshot

LEVELS = native.levels()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
pytestmark = pytest.mark.skipif(not LEVELS, reason=native.why_not() or "no compiled kernels")


def problem(seed: int, parts: int, batch: int, tokens: int, tiers: int) -> Problem:
    """Parts of different lengths and ladders, with ties, tokens that are not sent and tiers that carry not all."""
    generator = torch.Generator().manual_seed(seed)
    ladders, errors, sent = [], [], []
    for part in range(parts):
        most, length = max(1, tiers - part % 2), max(1, tokens - 3 * (part % 3))
        costs = torch.tensor([16 >> min(tier, 3) for tier in range(most)])
        table = costs[:, None] * torch.arange(length + 1) + 7 * (torch.arange(length + 1) > 0)
        ladders.append(Ladder(tuple(f"t{tier}" for tier in range(most)), table))
        error = torch.rand(most, batch, length, generator=generator).mul_(40).round_().exp2_()
        error[1:].masked_fill_(torch.rand(batch, length, generator=generator) < 0.1, torch.inf)
        error[0] = 0
        errors.append(error)
        sent.append(torch.rand(batch, length, generator=generator) < 0.9)
    return Problem(ladders, errors, sent)


def equal(one: Choice, other: Choice) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("tiers", "error", "nbytes"))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    parts=st.integers(1, 5),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 300),
    tiers=st.integers(1, 8),
    price=st.floats(1e-6, 1e9),
    threads=st.integers(1, 3),
)
def test_choices(level, seed, parts, batch, tokens, tiers, price, threads) -> None:
    made = problem(seed, parts, batch, tokens, tiers)
    allowed = made.price.isfinite() & (torch.rand(made.price.shape, generator=torch.manual_seed(seed)) < 0.8)
    cost = (made.price * price).masked_fill(~allowed, torch.inf)
    with native.forced_isa(level):
        got = native.choose(made.error, cost, made.sent, made.tables, made.start, made.names, threads)
    assert got is not None
    assert equal(Choice(*got), Choice(*made._choose(cost)))


def test_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(3, 6, 2, 400, 7)
    most = 16 * int(made.sent.sum())
    found = [made.solve(round(most * share)) for share in (0.35, 0.6, 0.9)]
    monkeypatch.setenv("KVFERRY_NATIVE", "0")
    for share, choice in zip((0.35, 0.6, 0.9), found, strict=True):
        other = made.solve(round(most * share))
        assert choice is not None
        assert other is not None
        assert equal(choice, other)


@pytest.mark.parametrize("budget", [0.25, 0.28, 0.6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packets(budget: float, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = unmasked(make_snapshot([FULL] * 3, seq_len=200, kv_heads=2, head_dim=64, dtype=dtype))
    native_plan = plan(snapshot, budget, "optimal")
    monkeypatch.setenv("KVFERRY_NATIVE", "0")
    torch_plan = plan(snapshot, budget, "optimal")
    assert native_plan.header_bytes == torch_plan.header_bytes
    assert torch.equal(native_plan.allocation.key_tiers, torch_plan.allocation.key_tiers)
    assert torch.equal(native_plan.allocation.value_tiers, torch_plan.allocation.value_tiers)


def test_a_table_that_is_too_short_is_refused() -> None:
    made = problem(1, 2, 1, 50, 3)
    cost = torch.zeros(made.price.shape)
    with pytest.raises(ValueError, match="table"):
        native.choose(made.error, cost, made.sent, made.tables[:20], made.start, made.names)


SPECS = ("sym8", "sym3", "asym4g64", "asym5row", "chan4b32", "chan2b128", "had4g64", "had3g16", "cen4g64", "cen2g32")


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 400),
    dim=st.sampled_from((1, 15, 16, 48, 64, 80, 128)),
    indexed=st.booleans(),
    turned=st.booleans(),
    threads=st.integers(1, 2),
)
def test_errors(level, seed, spec, dtype, heads, tokens, dim, indexed, turned, threads) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, dim, generator=generator).mul_(3).exp_().clamp_(max=1e4).to(dtype)
    if turned:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    index = (torch.rand(tokens, generator=generator) < 0.6).nonzero().flatten() if indexed else None
    root = torch.rand(heads, dim, generator=generator)
    count = tokens if index is None else index.numel()
    got = torch.full((count,), 7.0)
    with native.forced_isa(level):
        assert native.measure_rows(spec, x, index, root, got, threads)
    if count:
        want = distortion._token_errors(spec, x if index is None else x.index_select(1, index), root)
        assert torch.equal(got, want)


def test_long_tensors_are_measured_in_tiles() -> None:
    x = torch.randn(2, 3000, 128).to(torch.bfloat16)
    root = torch.rand(2, 128)
    for spec in SPECS:
        for threads in (1, 2):
            got = torch.empty(3000)
            assert native.measure_rows(spec, x, None, root, got, threads)
            assert torch.equal(got, distortion._token_errors(spec, x, root)), spec


def test_what_is_not_for_measuring() -> None:
    x, root, out = torch.randn(2, 9, 64), torch.rand(2, 64), torch.empty(9)
    assert not native.measure_rows("sym8", x.double(), None, root, out)
    assert not native.measure_rows("sym8", x, None, root[:1], out)
    assert not native.measure_rows("sym8", x, None, root, out[:8])
    assert not native.measure_rows("had4g3", x, None, root, out)
    with pytest.raises(InvalidInput, match="outside of 9 tokens"):
        native.measure_rows("sym8", x, torch.tensor([9]), root, out[:1])


BAD = (torch.inf, -torch.inf, torch.nan)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_every_place_is_looked_at(level: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7, 33).to(dtype)
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x[0, 0, 0, :4] = torch.tensor([most, -most, torch.finfo(dtype).tiny, -0.0], dtype=torch.float64)
    views = (x, x[:, :, 1:6], x[..., 3:20], x.transpose(1, 3), x[:, 1:, ::2, ::3], x[1, 2, 5])
    with native.forced_isa(level):
        for view in views:
            assert native.all_finite(view) is True
            for place in range(0, view.numel(), 5):
                at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), view.shape))
                kept = view[at].clone()
                view[at] = BAD[place % 3]
                assert native.all_finite(view) is False
                view[at] = kept


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_16_bit_pattern_is_told(level: str, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16).to(torch.int16).view(dtype)
    want = x.isfinite()
    with native.forced_isa(level):
        assert native.all_finite(x[want]) is True
        assert all(native.all_finite(one) is False for one in x[~want].split(1))


def test_long_rows_and_threads() -> None:
    x = torch.zeros(1, 2, 9000, 128, dtype=torch.bfloat16)
    for threads in (1, 2):
        assert native.all_finite(x, threads) is True
        for place in (0, 131072, x.numel() // 2 - 1, x.numel() - 1):
            x.view(-1)[place] = torch.inf
            assert native.all_finite(x, threads) is False
            assert native.all_finite(x[:, :, :-1], threads) is (place >= x.numel() // 2 - 1)
            x.view(-1)[place] = 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), dtype=st.sampled_from((*DTYPES, torch.float64)), number=st.integers(0, 3))
def test_tokens(seed: int, dtype: torch.dtype, number: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 10, 8, generator=generator).to(dtype)
    for place in torch.randint(0, x.numel(), (number,), generator=generator).tolist():
        x.view(-1)[place] = (*BAD, 1e39 if dtype == torch.float64 else 1.0)[place % 4]
    bad: Tensor = ~x.to(torch.float32).isfinite().all(dim=3).all(dim=1)
    found = nonfinite_tokens(x)
    assert torch.equal(bad, torch.zeros_like(bad) if found is None else found)
