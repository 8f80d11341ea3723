"""Errors keep what they carry across processes."""

from __future__ import annotations

import pickle

import kvferry as kv


def test_errors_with_fields_are_pickled_whole() -> None:
    """Pools and engines send errors as pickles; a class that cannot be built again takes the worker down instead."""
    refused = kv.IncompatibleIdentity("made for another model", {"weights": ("a", "b")})
    again = pickle.loads(pickle.dumps(refused))
    assert (str(again), again.differences) == (str(refused), refused.differences)
    small = kv.BudgetTooSmall("no plan", 0.1, 0.26)
    other = pickle.loads(pickle.dumps(small))
    assert (str(other), other.budget, other.least_budget) == ("no plan", 0.1, 0.26)
