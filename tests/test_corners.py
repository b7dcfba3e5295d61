"""The corners of the routing table on a CPU; tests/gpu/test_routing.py has the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import magi_flex
from tests.cases.corners import CORNERS, check_corner


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with magi_flex.enable():
        yield


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str, backend: str) -> None:
    check_corner(name, backend, "cpu")
