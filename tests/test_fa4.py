"""Backend ``fa4`` without flash-attn-4: what it hands over, against a stand-in for the package's two functions.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D head dim, E value head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import fa4_masks
from magi_flex.kernels.fa4 import Fa4Backend
from magi_flex.kernels.request import (
    AttentionRequest,
    Bias,
    Distance,
    Multiply,
    ScoreProgram,
    ScoreStep,
    Softcap,
)
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Documents
from tests.cases.masks import make_mask
from tests.cases.reference import dense_attention_with_gradients
from tests.fa4_standin import INTERVAL_MASKS, Package, install, plan_of


@pytest.fixture(params=[90, 100])
def standin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    return install(request.param, monkeypatch)


def check(
    standin: Package,
    name: str,
    q_len: int,
    kv_len: int,
    steps: tuple[ScoreStep, ...] = (),
    score_mod: Any = None,
    scale: float = 0.3,
    group: int = 2,
    layout: str = "heads",
    expanded: bool = False,
    plan: MaskPlan | None = None,
    dims: tuple[int, int] = (32, 32),
) -> list[str]:
    """Run forward and backward against dense float64 attention; returns the ways taken."""
    case = make_mask(name, q_len, kv_len)
    dense = case.dense()
    batch = case.batch if case.batch > 1 else 2
    heads, group = (case.heads, 1) if case.heads > 1 else (2 * group, group)
    torch.manual_seed(0)

    def tensor(heads: int, rows: int, dim: int) -> Tensor:
        if layout == "rows":
            return torch.randn(batch, rows, heads, dim).transpose(1, 2)
        return torch.randn(batch, heads, rows, dim)

    q, k, v, d_out = (
        tensor(heads, q_len, dims[0]),
        tensor(heads // group, kv_len, dims[0]),
        tensor(heads // group, kv_len, dims[1]),
        None,
    )
    if expanded:
        k, v = (x[:1].expand(batch, -1, -1, -1) for x in (k, v))
    d_out, d_lse = tensor(heads, q_len, dims[1]), torch.randn(batch, heads, q_len)
    request = AttentionRequest(q, k, v, plan or plan_of(dense), scale, ScoreProgram(steps=steps), max_score=False)
    backend = Fa4Backend()
    result = backend.forward(request)
    exact = dense_attention_with_gradients(q, k, v, d_out, d_lse, dense, score_mod, (), scale)
    grads = backend.backward(request, result.out, result.lse, d_out, d_lse)
    for got, want, like in (
        (result.out, exact.out, q),
        (result.lse, exact.lse, None),
        (grads.dq, exact.dq, q),
        (grads.dk, exact.dk, k),
        (grads.dv, exact.dv, v),
    ):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
        if like is not None and not expanded:
            assert sorted(range(4), key=lambda d: got.stride(d)) == sorted(range(4), key=lambda d: like.stride(d))
    ways, standin.ways = standin.ways, []
    return ways


@pytest.mark.parametrize("standin", [90], indirect=True)
@pytest.mark.parametrize("name", INTERVAL_MASKS)
def test_every_mask(name: str, standin: Package) -> None:
    check(standin, name, 60, 133)


def test_lengths(standin: Package) -> None:
    for q_len, kv_len in ((1, 1), (1, 129), (129, 5), (257, 257)):
        check(standin, "sink_and_window", q_len, kv_len)
    check(standin, "per_batch_and_head_mix", 100, 100)


def test_own_ways(standin: Package) -> None:
    for name, q_len, kv_len, way in (
        ("full", 40, 70, "full"),
        ("causal", 70, 70, "{'causal': True}"),
        ("lower_right_causal", 40, 70, "{'causal': True}"),
        ("causal", 40, 70, "bits"),  # the package's causal ends at the last key
        ("key_padding", 70, 70, "bits"),
        ("nothing", 70, 70, "bits"),
    ):
        assert check(standin, name, q_len, kv_len) == [way] * 2, name
    (window,) = set(check(standin, "sliding_window", 70, 70))
    assert window.startswith("{'window_size_left': ")


def documents(batch: int, *lengths: int) -> tuple[MaskPlan, Tensor]:
    label = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(len(label))
    dense = (label[:, None] == label) & (row <= row[:, None])
    return plan_of(dense.expand(batch, 1, -1, -1)), dense


def test_packed_documents(standin: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 8)
    distance, bias = Distance(torch.tensor([0.1]), False), Bias(torch.randn(70), (0, 0, 1, 0), 0)
    slope, table = 0.1, bias.table
    for name, way in (("document", "packed full"), ("document_causal", "packed {'causal': True}")):
        assert check(standin, name, 70, 70, layout="rows", dims=(16, 16)) == [way] * 2
        # The batch is one sequence only where rows of neighbouring entries follow each other.
        assert check(standin, name, 70, 70, layout="rows") == [way] * 2
        assert check(standin, name, 70, 70, layout="heads") == ["bits"] * 2
    relative = check(standin, name, 70, 70, (distance,), lambda s, b, h, q, k: s + slope * (k - q), layout="rows")
    assert relative == [way] * 2
    assert check(standin, name, 70, 70, (bias,), lambda s, b, h, q, k: s + table[q], layout="rows") == ["bits"] * 2
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 70)
    assert check(standin, "document", 70, 70, layout="rows") == ["bits"] * 2


def test_scores_scales_and_layouts(standin: Package) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    table = torch.randn(4, 60 + 90 - 1)
    for steps, mod in (
        ((Multiply(2.0),), lambda s, b, h, q, k: 2 * s),
        ((Softcap(1.5),), lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5)),
        ((Distance(-slopes, True),), lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()),
        (
            (Multiply(0.5), Bias(table.flatten(), (0, 149, 1, -1), 89), Softcap(2.0)),
            lambda s, b, h, q, k: 2 * torch.tanh((0.5 * s + table[h, q - k + 89]) / 2),
        ),
    ):
        for name in ("full", "sink_and_window"):
            check(standin, name, 60, 90, steps, mod)
    check(standin, "causal", 50, 50, scale=-0.4)
    check(standin, "sink_and_window", 50, 70, scale=-0.4)
    check(standin, "sink_and_window", 50, 50, scale=0.0)
    check(standin, "full", 50, 50, layout="rows", group=1)
    check(standin, "sink_and_window", 50, 70, dims=(32, 8))
    check(standin, "causal", 50, 50, layout="rows", dims=(16, 8), group=1)
    check(standin, "sink_and_window", 50, 70, dims=(40, 40))
    check(standin, "prefix_lm", 50, 50, expanded=True)


def test_nothing_to_do(standin: Package) -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k = torch.randn(1, 2, q_len, 8), torch.randn(1, 1, kv_len, 8)
        request = AttentionRequest(q, k, k, MaskPlan(RowIntervals.full(q_len, kv_len)), 1.0)
        result = Fa4Backend().forward(request)
        assert not result.out.any() and (result.lse == -math.inf).all()
        grads = Fa4Backend().backward(request, result.out, result.lse, torch.ones_like(result.out), None)
        assert not any(x.any() for x in (grads.dq, grads.dk, grads.dv))
    assert standin.ways == []


def test_a_known_structure_is_believed(standin: Package) -> None:
    """And one that is looked up is looked up once."""
    from magi_flex.op_specs import MaskSpec

    plan = replace(MaskSpec(None, "").build([], [], 2, 4, 40, 70, torch.device("cpu")).plan)  # without its memo
    assert plan.structure is not None and check(standin, "full", 40, 70, plan=plan) == ["full"] * 2
    plan, _ = documents(1, 30, 200)
    first = fa4_masks.structure_of(plan)
    assert isinstance(first, Documents) and fa4_masks.structure_of(plan) is first


def test_later_calls_are_launches_alone(standin: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's interface, on other tensors; unless something that the launch holds is another one."""
    monkeypatch.setattr(fa4_masks, "LEAST_MEAN_DOCUMENT", 8)
    document = plan_of(make_mask("document", 70).dense())
    for plan, batch in ((plan_of(make_mask("sink_and_window", 70).dense()), 2), (document, 1)):

        def calls(
            scale: float = 0.3,
            offset: int = 0,
            lse: bool = False,
            plan: MaskPlan = plan,
            batch: int = batch,
            **more: Any,
        ) -> int:
            """How many calls of the interface a forward and a backward take."""
            q, k, v, d_out = (
                torch.randn(offset + batch * 70 * heads * 32)[offset:].view(batch, 70, heads, 32).transpose(1, 2)
                for heads in (4, 2, 2, 4)
            )
            d_lse = torch.randn(batch, 4, 70) if lse else None
            request = AttentionRequest(q, k, v, plan, scale, max_score=False, **more)
            result = Fa4Backend().forward(request)
            grads = Fa4Backend().backward(request, result.out, result.lse, d_out, d_lse)
            mod = (lambda s, b, h, q, k: 2 * torch.tanh(s / 2)) if more else None
            exact = dense_attention_with_gradients(q, k, v, d_out, d_lse, plan.intervals.to_dense(), mod, (), scale)
            torch.testing.assert_close(result.out.double(), exact.out, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(result.lse.double(), exact.lse, atol=2e-5, rtol=2e-5)
            for name in ("dq", "dk", "dv"):
                torch.testing.assert_close(getattr(grads, name).double(), getattr(exact, name), atol=3e-5, rtol=3e-5)
            calls, standin.ways = len(standin.ways), []
            return calls

        assert [calls() for _ in range(3)] == [2, 0, 0]
        assert [calls(lse=True) for _ in range(3)] == [1, 0, 0]  # another argument of the backward's
        assert calls(scale=0.2) == 2  # another argument of both
        assert [calls(scale=-0.3) for _ in range(2)] == [2, 2]  # q changes its sign
        softcap = ScoreProgram(steps=(Softcap(2.0),))
        assert [calls(score=softcap) for _ in range(2)] == [2, 0]
        assert [calls(offset=1) for _ in range(2)] == [2, 2]  # copied, as kernels want aligned addresses
        assert [calls(), calls(score=softcap)] == [0, 0]
        plan.starts.add_(0)  # as if new documents were written there
        assert [calls() for _ in range(2)] == [2, 0]
