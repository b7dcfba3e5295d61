"""Which classes flash-attn-4's Hopper kernels are given, with stand-ins for the package."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

NAME = "magi_flex.kernels.fa4_hopper_forward"


@dataclass
class Rows:
    """Registers of a thread."""

    values: Tensor

    def load(self) -> Tensor:
        return self.values

    def store(self, values: Tensor) -> None:
        self.values = values


@dataclass
class Softmax:
    scale_log2: float
    num_rows: int
    row_max: Rows
    row_sum: Rows
    arch: int
    softmax_scale: float | None

    @staticmethod
    def create(*args: Any) -> Softmax:
        return Softmax(*args)

    def finalize(self, final_scale: float = 1.0, sink_val: None = None) -> float:
        self.row_sum.store(self.row_sum.load().log())
        return final_scale


class SingleTileScheduler:
    @dataclass
    class Params:
        num_block: int

    def __init__(self, params: Params, block: tuple[int, int, int], *, loc: Any = None, ip: Any = None) -> None:
        self.block = block

    @staticmethod
    def create(params: Params, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> SingleTileScheduler:
        return SingleTileScheduler(params, (2, 3, 4))


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module beside a fresh stand-in of the package."""
    kernels = SimpleNamespace(Softmax=Softmax, SingleTileScheduler=SingleTileScheduler)
    cute = SimpleNamespace(arch=SimpleNamespace(block_idx=lambda: (2, 3, 4)), Tensor=object)
    modules: dict[str, dict[str, Any]] = {
        "cutlass": {"cute": cute},
        "cutlass.cute": vars(cute),
        "flash_attn": {},
        "flash_attn.cute": {"flash_fwd_sm90": kernels},
        "flash_attn.cute.softmax": {"Softmax": Softmax},
        "flash_attn.cute.tile_scheduler": {"SingleTileScheduler": SingleTileScheduler},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def logarithm(forward: Any) -> float:
    """What a kernel that is traced now writes for a sum of 8."""
    softmax = forward.flash_fwd_sm90.Softmax.create(1.0, 1, Rows(torch.ones(1)), Rows(torch.tensor([8.0])), 90, None)
    softmax.finalize()
    return float(softmax.row_sum.load())


def first_tile(forward: Any) -> tuple[int, int, int]:
    return forward.flash_fwd_sm90.SingleTileScheduler.create(SingleTileScheduler.Params(num_block=10)).block


def test_kernels_are_adapted_where_that_is_asked_for(forward: Any) -> None:
    elsewhere: list[float] = []
    for last_rows_first, tile in ((False, (2, 3, 4)), (True, (7, 3, 4))):
        with forward.adapted(last_rows_first):
            assert logarithm(forward) == pytest.approx(3) and first_tile(forward) == tile
            thread = threading.Thread(target=lambda: elsewhere.append(logarithm(forward)))
            thread.start()
            thread.join()
        assert logarithm(forward) == pytest.approx(math.log(8)) and first_tile(forward) == (2, 3, 4)
    assert elsewhere == [pytest.approx(math.log(8))] * 2


def test_threads_that_ask_at_once_get_one_answer(forward: Any) -> None:
    """Else a kernel could be traced for the one base and be taken for one of the other."""
    for ask in (forward.writes_base_2, forward._orders):
        assert ask() and ask.__wrapped__()


def test_another_package_is_left_alone(forward: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Changed(Softmax):
        pass

    forward.flash_fwd_sm90.Softmax = Changed
    with forward.adapted(False):
        assert logarithm(forward) == pytest.approx(math.log(8))
    assert not forward.writes_base_2() and forward.flash_fwd_sm90.Softmax is Changed
    assert "class Softmax has changed" in caplog.text
