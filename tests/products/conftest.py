"""Fixtures of the tests of products."""

import pytest
from fuzz_ternary import clear_plans, own_rows


@pytest.fixture(params=["large", "few"])
def any_rows(request, monkeypatch):
    """Ternary products of any weight, as of large ones and as of those with few rows, whose warps have their own."""
    own_rows(monkeypatch, request.param == "few")
    yield
    clear_plans()
