"""The survival curve against scipy's, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvferry.errors import InvalidInput
from kvferry.evidence.survival import kaplan_meier


def test_by_hand() -> None:
    curve = kaplan_meier([3, 5, 5, 8, 8], [True, True, False, True, False])
    assert curve.times == (3, 5, 8)
    assert curve.surviving == pytest.approx((4 / 5, 4 / 5 * 3 / 4, 4 / 5 * 3 / 4 / 2))
    assert (curve.n, curve.events, curve.median()) == (5, 3, 8)
    assert kaplan_meier([9, 9], [False, False]).median() is None


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=60))
def test_it_is_scipys(runs: list[tuple[int, bool]]) -> None:
    times, split = [time for time, _ in runs], [event for _, event in runs]
    curve = kaplan_meier(times, split)
    seen = [time for time, event in runs if event]
    censored = [time for time, event in runs if not event]
    if not seen:
        assert curve.times == ()
        return
    expected = stats.ecdf(stats.CensoredData(uncensored=seen, right=censored)).sf
    assert curve.surviving == pytest.approx(tuple(expected.evaluate(np.array(curve.times))), abs=1e-14)
    with np.errstate(all="ignore"):
        interval = expected.confidence_interval(0.95, method="log-log")
    at = np.array(curve.times)
    for mine, theirs in ((curve.low, interval.low.evaluate(at)), (curve.high, interval.high.evaluate(at))):
        assert [value for value in mine if value is not None] == pytest.approx(
            [other for value, other in zip(mine, theirs, strict=True) if value is not None], abs=1e-12
        )


def test_what_is_refused() -> None:
    for times, split in (([], []), ([1], []), ([-1], [True])):
        with pytest.raises(InvalidInput):
            kaplan_meier(times, split)
