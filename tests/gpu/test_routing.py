"""The corners of the routing table: every backend that serves a call against dense float64, the others refuse it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import magi_flex
from magi_flex.kernels.route import backend_names
from tests.cases.corners import CORNERS, check_corner
from tests.compiling import attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    """Also where tensors are made on the GPU unless said otherwise."""
    with magi_flex.enable(), torch.device("cuda"):
        yield


@pytest.mark.parametrize("backend", ["auto", *(name for name in backend_names() if name != "cpu")])
@pytest.mark.parametrize("name", CORNERS)
def test_corner(name: str, backend: str) -> None:
    check_corner(name, backend, "cuda")


def test_stock_kernels_serve_what_is_left_to_them() -> None:
    check_corner("general", "stock", "cuda", torch.compile(attend, fullgraph=True, dynamic=False))
