"""A watched call made again: kernels get memory of the interface's own, laid out as it was."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi_flex.kernels.fa4_launch import watched


@pytest.mark.parametrize(
    ("columns", "view", "repeatable"), [(5, False, True), (10, False, False), (5, True, False)], ids=str
)
def test_memory_of_the_interface_keeps_its_layout(columns: int, view: bool, repeatable: bool) -> None:
    """``columns`` of the rows' memory, of 10 every other one is a gap; ``view``: kernels see it in two shapes."""
    strides: list[tuple[int, ...]] = []

    def double(x: Tensor, rows: Tensor) -> None:
        strides.append(rows.stride())
        rows.copy_(2 * x)

    def add(rows: Tensor, sums: Tensor) -> None:
        strides.append(sums.stride())
        sums += rows.reshape(sums.shape)

    def copy(sums: Tensor, out: Tensor) -> None:
        out.copy_(sums)

    interface = SimpleNamespace(compile_cache={"double": double, "add": add, "copy": copy})

    def another() -> None:
        interface.compile_cache["copy"](torch.zeros(6, 5), torch.zeros(6, 5))

    def call(x: Tensor, out: Tensor) -> None:
        other = threading.Thread(target=another)  # whose calls are not ours
        other.start()
        other.join()
        rows, sums = torch.empty(6, columns).t()[:: columns // 5], torch.zeros(6, 5).t()
        interface.compile_cache["double"](x, rows)
        interface.compile_cache["add"](rows[None] if view else rows, sums)
        interface.compile_cache["copy"](sums, out)

    x, out = torch.randn(5, 6), torch.empty(5, 6)
    launch = watched(lambda: call(x, out), [interface], [x, out])
    assert torch.equal(out, 2 * x) and (launch is not None) == repeatable
    if launch is not None:
        assert len(launch.calls) == 3
        other, result = torch.randn(5, 6), torch.empty(5, 6)
        launch(other, result)
        assert torch.equal(result, 2 * other) and strides[2:] == strides[:2] == [(1, 5), (1, 5)]
