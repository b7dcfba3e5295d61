"""Compiled flex_attention with our kernels: forward, backward, masks of any origin, shapes, statistics, sharing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock

import magi_flex
from magi_flex import ops
from tests.cases.masks import make_mask
from tests.compiling import attend, check_training, qkv


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with magi_flex.enable():
        yield


@pytest.fixture(scope="module")
def static() -> Any:
    return torch.compile(attend, fullgraph=True, dynamic=False)


@pytest.fixture(scope="module")
def dynamic() -> Any:
    return torch.compile(attend, fullgraph=True, dynamic=True)


def block_mask(case: Any, make: Any = stock.create_block_mask, **options: Any) -> Any:
    batch = case.batch if case.batch > 1 else None
    heads = case.heads if case.heads > 1 else None
    return make(case.mask_mod, batch, heads, case.q_len, case.kv_len, device="cpu", **options)


class Calls:
    """Counts what the compiled graphs run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.plans = self.forward = self.backward = 0

        def counted(name: str, function: Any) -> Any:
            def call(*args: Any) -> Any:
                setattr(self, name, getattr(self, name) + 1)
                return function(*args)

            return call

        monkeypatch.setattr(ops.MaskSpec, "build", counted("plans", ops.MaskSpec.build))
        monkeypatch.setattr(ops, "run_forward", counted("forward", ops.run_forward))
        monkeypatch.setattr(ops, "run_backward", counted("backward", ops.run_backward))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
def test_training_dynamic(dynamic: Any, calls: Calls, make: Any) -> None:
    for name, q_len, kv_len in (("document_causal", 129, 129), ("document_causal", 257, 257), ("causal", 65, 130)):
        case = make_mask(name, q_len, kv_len)
        check_training(dynamic, qkv(q_len=q_len, kv_len=kv_len), case.dense(), block_mask(case, make))
    assert (calls.plans, calls.forward, calls.backward) == (3, 3, 3)
