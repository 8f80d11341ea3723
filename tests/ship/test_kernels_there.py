"""Tests of the compiled kernels are skipped where there are none: there are, wherever they can be compiled."""

from __future__ import annotations

import shutil

import pytest

from kvferry.ship import native


def test_kernels_are_there_where_there_is_a_compiler() -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler: the codec runs on torch alone")
    assert native.available(), native.why_not()
    assert native.levels()
