"""A watched call made again: kernels get memory of the interface's own, laid out as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi_flex.kernels.fa4_launch import Adaption, watched


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


def test_adapted_kernels_are_kept_beside_the_package_s_own() -> None:
    """Whoever calls the package gets its kernels, on other threads as well while ours are compiled."""
    interface = SimpleNamespace(compile_cache={})
    traced_as: list[str] = ["own"]

    @contextlib.contextmanager
    def tracing() -> Iterator[None]:
        traced_as.append("adapted")
        yield
        traced_as.pop()

    def call(x: Tensor, out: Tensor, kind: str | None = None) -> None:
        if "key" not in interface.compile_cache:
            kind = traced_as[-1] if kind is None else kind
            interface.compile_cache["key"] = lambda x, out: out.copy_(x if kind == "own" else 2 * x)
        interface.compile_cache["key"](x, out)

    x, out, elsewhere = torch.randn(4), torch.empty(4), torch.empty(4)

    def work() -> None:
        other = threading.Thread(target=call, args=(x, elsewhere, "own"))
        other.start()
        other.join()
        call(x, out)

    for key in ("a", "b", "a"):
        launch = watched(work, [interface], [x, out], Adaption(tracing(), key, base_2=True))
        assert torch.equal(out, 2 * x) and torch.equal(elsewhere, x)
        assert launch is not None and len(launch.calls) == 1
    call(x, out)
    assert torch.equal(out, x) and len(interface.compile_cache) == 3
