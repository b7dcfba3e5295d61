"""Python floats that a score mod captures and that change from call to call, in training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import magi_flex
from inductor_lowering.captured_floats import floats_as_tensors
from tests.compiling import attend, check_training, qkv


def bind(value: float) -> Callable[..., Any]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = q - k < value * 10
        return torch.where(near, s.clamp(max=value) + (q - k) * value, (s * (value * value) - 1) / 2)

    return score_mod


def attend_with(value: float, *inputs: Any) -> Tensor:
    return attend(*inputs, bind(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training(compiled: bool, dtype: torch.dtype) -> None:
    if compiled and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("this torch refuses a captured float that changes, as a SymFloat")
    torch._dynamo.reset()
    function = torch.compile(attend_with, fullgraph=True) if compiled else attend_with
    counters = torch._dynamo.utils.counters["stats"]
    with magi_flex.enable():
        for number, value in enumerate((1.0, 0.7, 2.5, -1.25)):
            before = counters["unique_graphs"]
            check_training(
                lambda q, k, v, score_mod, block_mask, value=value: function(value, q, k, v),
                qkv(q_len=33, dtype=dtype, seed=number),
                None,
                score_mod=bind(value),
                floor=2e-6,
            )
            assert number < 2 or counters["unique_graphs"] == before


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_arithmetic_between_numbers(compiled: bool) -> None:
    """Quotients and magnitudes of captured floats, in inference: our kernels compute them."""

    def attend_capped(value: float, *inputs: Any) -> Tensor:
        return attend(*inputs, lambda s, b, h, q, k: torch.tanh(s * (1 / value)) * abs(value))

    torch._dynamo.reset()
    function = torch.compile(attend_capped, fullgraph=True) if compiled else attend_capped
    inputs = qkv(q_len=20, kv_heads=4, grad=False)
    with magi_flex.enable():
        for value in (1.5, 0.7, -1.25):
            scores = torch.tanh(inputs[0] @ inputs[1].mT / 4 / value) * abs(value)
            torch.testing.assert_close(function(value, *inputs), scores.softmax(-1) @ inputs[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_hard_mask_beside_whole_numbers(compiled: bool, dtype: torch.dtype) -> None:
    """The float meets q - k as float32: rounded to 16 bits, 33.1 (or 33.001) is 33."""

    def attend_near(width: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s, b, h, q, k: torch.where((q - k).abs() < width, s, -math.inf))

    torch._dynamo.reset()
    function = torch.compile(attend_near, fullgraph=True) if compiled else attend_near
    distance = (torch.arange(70)[:, None] - torch.arange(70)).abs()
    with magi_flex.enable():
        for width in (5.01, 33.001, 17.001):
            check_training(
                lambda q, k, v, score_mod, block_mask, width=width: function(width, q, k, v),
                qkv(q_len=70, dtype=dtype),
                (distance < width)[None, None],
                floor=2e-6,
            )


def test_more_than_arithmetic_is_an_error_that_says_what_to_do() -> None:
    @torch.compile(fullgraph=True)
    def function(value: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s, b, h, q, k: s + torch.full((), value))

    with magi_flex.enable():
        function(1.0, *qkv(q_len=20))
        with pytest.raises(Exception, match=r"capture a 0-d tensor instead"):
            function(2.0, *qkv(q_len=20))


def test_stock_is_left_alone() -> None:
    graph = torch.fx.symbolic_trace(lambda s, x: s * x + math.pi)
    assert floats_as_tensors(graph) is graph
