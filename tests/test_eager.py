"""Eager calls: plans and traced graphs are shared by calls that may share them, and by no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor

import magi_flex
from inductor_lowering import captured_floats, eager
from magi_flex import ops
from tests.cases.reference import dense_attention
from tests.compiling import attend, check_training, qkv


class Counts:
    plans = traces = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    seen, build, trace = Counts(), ops.MaskSpec.build, eager._trace

    def built(*args: Any) -> Any:
        seen.plans += 1
        return build(*args)

    def traced(*args: Any, **options: Any) -> Any:
        seen.traces += 1
        return trace(*args, **options)

    monkeypatch.setattr(ops.MaskSpec, "build", built)
    monkeypatch.setattr(eager, "_trace", traced)
    with magi_flex.enable():
        yield seen


def documents_mask(documents: Tensor) -> Any:
    size = len(documents)
    return stock.create_block_mask(
        lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), None, None, size, size, device="cpu"
    )


def test_layers_share_a_plan(counts: Counts) -> None:
    mask = documents_mask(torch.arange(129) // 30)
    x = qkv()
    for _ in range(3):  # layers
        x = (attend(*x, None, mask), *x[1:])
    x[0].sum().backward()
    assert counts.plans == 1
    attend(*qkv(), None, documents_mask(torch.arange(129) // 40))
    assert counts.plans == 2


@pytest.mark.parametrize("how", ["in place", "data", "numpy"])
def test_new_contents_are_a_new_mask(how: str, counts: Counts) -> None:
    memory = numpy.arange(129) // 200
    documents = torch.from_numpy(memory)
    mask = documents_mask(documents)
    inputs = qkv(grad=False)
    attend(*inputs, None, mask)
    if how == "in place":
        documents.copy_(torch.arange(129) // 40)
    elif how == "data":
        documents.data[100:] = 5
    else:
        memory[:50] = -1
    q, k = torch.arange(129)[:, None], torch.arange(129)
    dense = ((documents[q] == documents[k]) & (q >= k))[None, None]
    exact = dense_attention(*inputs, dense).out
    torch.testing.assert_close(attend(*inputs, None, mask).double(), exact, atol=1e-5, rtol=1e-5)
    assert counts.plans == 2


def test_the_backward_has_the_plan_of_its_forward(counts: Counts) -> None:
    memory = numpy.arange(129) // 30
    mask = documents_mask(torch.from_numpy(memory))
    inputs = qkv()
    out = attend(*inputs, None, mask)
    right = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    memory[:] = 0  # autograd does not see this
    for grad, exact in zip(torch.autograd.grad(out.sum(), inputs), right, strict=True):
        assert torch.equal(grad, exact)


def test_gradients_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each kind of call: dtypes, captured values, what wants a gradient."""
    traces: list[int] = []
    trace = captured_floats._stock_create_fw_bw_graph
    monkeypatch.setattr(captured_floats, "_stock_create_fw_bw_graph", lambda *args: traces.append(1) or trace(*args))
    bias = torch.linspace(-1, 1, 4).requires_grad_()
    sizes = {"q_len": 20, "kv_len": 20}

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(s) * bias[h]

    def reference(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(s) * exact[h]

    with magi_flex.enable():
        counts = []
        for seed in range(4):
            exact = bias.detach().double().requires_grad_()
            check_training(attend, qkv(**sizes, seed=seed), None, None, score_mod, reference, (bias,), (exact,))
            counts.append(len(traces))
        assert counts[0] == counts[-1]
        for value in (3, 5, 7, 3, 5, 7):  # each is a graph of its own
            check_training(attend, qkv(**sizes), None, score_mod=bind(value))
            counts.append(len(traces))
        assert counts[4] < counts[5] < counts[6] == counts[-1]


def test_graphs_of_gradients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured number may be another one in every call."""
    monkeypatch.setattr(captured_floats, "_stock_create_fw_bw_graph", lambda mod, *args: (mod, str(args)))
    mod = torch.fx.symbolic_trace(lambda score, number: score * number)
    with magi_flex.enable():
        create = captured_floats._higher_order.create_fw_bw_graph
        given = {create(mod, [torch.zeros(())], [number])[1] for number in range(100)}
    assert len(given) == 100 and 1 < len(captured_floats._joint_graphs[mod]) <= captured_floats._MOST_KINDS


def bind(value: int) -> Any:
    return lambda s, b, h, q, k: s * value / 4 + (q - k) * (value // 2) / 100


def test_captured_ints_are_traced_once_for_all_values(counts: Counts) -> None:
    for number, value in enumerate((3, 4, 5, 7)):
        before = counts.traces
        check_training(attend, qkv(q_len=20), None, score_mod=bind(value))
        assert number < 2 or counts.traces == before
