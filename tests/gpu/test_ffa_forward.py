"""The Hopper forward kernel against dense float64 attention; skipped where there is no Hopper GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import ffa
from magi_flex.kernels.ffa import FfaBackend, forward_instance, forward_schedule
from magi_flex.kernels.ffa_forward import ForwardLaunch
from magi_flex.kernels.request import (
    AttentionOutput,
    AttentionRequest,
    Multiply,
    ScoreProgram,
)
from magi_flex.kernels.tile_plans import choose_builder, has_room
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention
from tests.cases.score_steps import step_programs, steps_mod

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True, params=[2, 3], ids=["two_warpgroups", "three_warpgroups"])
def consumers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Row tiles of 128 and of 192 rows, whatever is faster for so few rows."""
    monkeypatch.setattr(ffa, "_GAIN_OF_THREE", 0.0 if request.param == 2 else math.inf)
    return request.param


LENGTHS = (1, 5, 127, 129, 257, 1025, 2046)


def inputs(
    shape: tuple[int, int, int, int, int, int, int], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v on the GPU for (B, H, G, Q, K, D, E)."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim = shape
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, q_len, head_dim, device="cuda").to(dtype)
    k = torch.randn(batch, kv_heads, kv_len, head_dim, device="cuda").to(dtype)
    v = torch.randn(batch, kv_heads, kv_len, v_dim, device="cuda").to(dtype)
    return q, k, v


def on_gpu(plan: MaskPlan) -> MaskPlan:
    return MaskPlan(RowIntervals(plan.starts.cuda(), plan.ends.cuda(), plan.kv_len))


def check(request: AttentionRequest, mask: Tensor | None) -> AttentionOutput:
    """Run the backend over poisoned memory and compare with float64 and with dense attention in the same precision."""
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    result = FfaBackend().forward(request)
    q, k, v = request.q, request.k, request.v
    factor = 1.0
    for step in request.score.steps or ():
        assert isinstance(step, Multiply)
        factor *= step.factor
    exact, rounded = (
        dense_attention(q, k, v, mask, scale=request.scale * factor, dtype=dtype) for dtype in (torch.float64, q.dtype)
    )
    assert_within_factor(result.out, rounded.out, exact.out, floor=1e-5 if request.wide_results else 1e-3)
    assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
    assert_within_factor(result.max_score, rounded.max_score, exact.max_score, floor=1e-5)
    return result


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    for length in (129, 1025):
        case = make_mask(name, length)
        dense = case.dense()
        plan = MaskPlan(RowIntervals.from_dense(dense))
        batch = case.batch if case.batch > 1 else 2
        heads, kv_heads = (case.heads, case.heads) if case.heads > 1 else (16, 2)
        q, k, v = inputs((batch, heads, kv_heads, length, length, 128, 128), seed=length)
        check(AttentionRequest(q, k, v, on_gpu(plan), 128**-0.5), dense.cuda())


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length: int) -> None:
    for name, other in itertools.product(("full", "causal", "document_causal", "sink_and_window"), (length, 333)):
        case = make_mask(name, length, other)
        dense = case.dense()
        q, k, v = inputs((case.batch, 16, 2, length, other, 128, 128), seed=length)
        check(AttentionRequest(q, k, v, on_gpu(MaskPlan(RowIntervals.from_dense(dense))), 0.1), dense.cuda())


@pytest.mark.parametrize(
    "dims", [(64, 64), (56, 64), (96, 96), (128, 128), (72, 120), (192, 128), (192, 192), (256, 256), (8, 8)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    groups = [(1, False), (4, True)] + ([(8, False), (6, False)] if dims == (128, 128) else [])
    for group, wide in groups:
        dense = make_mask("sink_and_window", 515).dense()
        q, k, v = inputs((2, 2 * group, 2, 515, 515, *dims), dtype, seed=group)
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        check(AttentionRequest(q, k, v, plan, dims[0] ** -0.5, wide_results=wide), dense.cuda())


def test_layouts_and_scales() -> None:
    length = 261
    dense = make_mask("causal", length).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v = inputs((2, 8, 2, length, length, 128, 128))
    by_row = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    result = check(AttentionRequest(*by_row, plan, 0.1), dense.cuda())
    assert result.out.stride() == by_row[0].stride()
    packed = torch.randn(2, length, 12, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    check(AttentionRequest(packed[:, :8], packed[:, 8:10], packed[:, 10:], plan, 0.1), dense.cuda())
    unaligned = torch.randn(2, 8, length, 129, device="cuda", dtype=torch.bfloat16)[..., 1:]
    check(AttentionRequest(unaligned, k, v, plan, 0.1), dense.cuda())
    check(AttentionRequest(q, k[:1].expand(2, -1, -1, -1), v, plan, 0.1), dense.cuda())
    for scale, factor in ((-0.1, 1.0), (0.1, -2.0), (0.0, 1.0), (30.0, 1.0), (1e-3, 7.0)):
        score = ScoreProgram(steps=(Multiply(factor),))
        check(AttentionRequest(q, k, v, plan, scale, score), dense.cuda())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_score_steps(head_dim: int, group: int) -> None:
    batch, kv_heads, q_len, kv_len = 2, 2, 150, 291
    heads = kv_heads * group
    case = make_mask("sink_and_window", q_len, kv_len)
    dense = case.dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v = inputs((batch, heads, kv_heads, q_len, kv_len, head_dim, min(head_dim, 128)))
    for steps in step_programs(batch, heads, q_len, kv_len, "cuda").values():
        request = AttentionRequest(q, k, v, plan, 0.2, ScoreProgram(steps=steps))
        result = FfaBackend().forward(request)
        q_cpu, k_cpu, v_cpu, mod = q.cpu(), k.cpu(), v.cpu(), steps_mod(steps)
        exact, rounded = (
            dense_attention(q_cpu, k_cpu, v_cpu, dense, mod, 0.2, dtype) for dtype in (torch.float64, q.dtype)
        )
        assert_within_factor(result.out.cpu(), rounded.out, exact.out, floor=1e-3)
        assert_within_factor(result.lse.cpu(), rounded.lse, exact.lse, floor=1e-3)
        assert_within_factor(result.max_score.cpu(), rounded.max_score, exact.max_score, floor=1e-3)


@pytest.mark.parametrize("name", ["causal", "document_causal", "query_and_key_padding"])
def test_accumulation(name: str) -> None:
    """Results over some keys, merged inside the kernel into those over others."""
    length = 1025
    case = make_mask(name, length)
    mask = case.dense().cuda()
    batch, heads = max(2, case.batch), 16
    q, k, v = inputs((batch, heads, 2, length, length, 128, 128))
    exact, rounded = (dense_attention(q, k, v, mask, scale=0.1, dtype=dtype) for dtype in (torch.float64, q.dtype))
    left = torch.arange(length, device="cuda") < 300
    lse = torch.full((batch, heads, length), -torch.inf, device="cuda")
    total = AttentionOutput(torch.zeros(batch, heads, length, 128, device="cuda"), lse, lse.clone())
    for part in (mask & left, torch.zeros_like(mask), mask & ~left):
        plan = MaskPlan(RowIntervals.from_dense(part))
        total = FfaBackend().accumulate(AttentionRequest(q, k, v, plan, 0.1, wide_results=True), total)
    assert total.lse is lse
    assert_within_factor(total.out, rounded.out, exact.out, floor=1e-5)
    assert_within_factor(total.lse, rounded.lse, exact.lse, floor=1e-5)
    assert_within_factor(total.max_score, rounded.max_score, exact.max_score, floor=1e-5)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (64, 64)])
def test_parts_of_the_keys(dims: tuple[int, int]) -> None:
    """Decoding: few rows, many keys."""
    for batch, q_len, wide in ((1, 1, False), (3, 5, True), (2, 130, False)):
        kv_len = 5000
        q, k, v = inputs((batch, 16, 2, q_len, kv_len, *dims))
        ends = torch.arange(q_len, dtype=torch.int32).view(1, 1, 1, -1) + kv_len - q_len + 1
        ends = ends - 700 * torch.arange(batch, dtype=torch.int32).view(-1, 1, 1, 1)
        starts = ends - 4000
        if q_len > 4:
            ends[..., 3] = 0  # an empty row
        plan = MaskPlan(RowIntervals.build(starts.clamp(min=0), ends.clamp(min=0), kv_len))
        request = AttentionRequest(q, k, v, on_gpu(plan), 0.1, wide_results=wide)
        first = check(request, plan.to_dense().cuda())
        for _ in range(5):
            assert torch.equal(FfaBackend().forward(request).out, first.out)


def test_multiprocessors_left_to_others() -> None:
    dense = make_mask("chunked_local", 1025).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    for margin in (1, 100, 1000):
        q, k, v = inputs((2, 16, 2, 1025, 1025, 128, 128))
        check(AttentionRequest(q, k, v, plan, 0.1, sm_margin=margin), dense.cuda())


def test_short_steps() -> None:
    """Every number of keys, so that the short step occurs alone, before whole steps, and not at all."""
    q_len, kv_len = 600, 300
    ends = torch.arange(q_len, dtype=torch.int32).view(1, 1, 1, -1) % (kv_len + 1)
    starts = (ends - 140).clamp(min=0) * (torch.arange(q_len) % 3 == 0).int()
    plan = MaskPlan(RowIntervals.build(starts, ends, kv_len))
    for heads, kv_heads in ((8, 1), (2, 2)):
        q, k, v = inputs((1, heads, kv_heads, q_len, kv_len, 128, 128))
        check(AttentionRequest(q, k, v, on_gpu(plan), 0.1), plan.to_dense().cuda())


def test_no_keys_or_rows() -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k, v = inputs((1, 2, 2, q_len, kv_len, 64, 64))
        result = FfaBackend().forward(AttentionRequest(q, k, v, MaskPlan(RowIntervals.full(q_len, kv_len, "cuda")), 1))
        assert (result.out == 0).all() and (result.lse == -torch.inf).all() and (result.max_score == -torch.inf).all()


def test_many_random_intervals_and_empty_rows() -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        q_len, kv_len = int(torch.randint(1, 700, ())), int(torch.randint(1, 700, ()))
        starts = torch.randint(0, kv_len + 1, (1, 1, 9, q_len), dtype=torch.int32)
        ends = torch.randint(0, kv_len + 1, (1, 1, 9, q_len), dtype=torch.int32)
        ends[..., torch.rand(q_len) < 0.2] = 0
        plan = MaskPlan(RowIntervals.build(starts, ends, kv_len))
        q, k, v = inputs((1, 8, 1, q_len, kv_len, 128, 128), seed=seed)
        check(AttentionRequest(q, k, v, on_gpu(plan), 0.1), plan.to_dense().cuda())


def test_repeated_runs_agree_bitwise() -> None:
    length = 2046
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(make_mask("chunked_local", length).dense())))
    q, k, v = inputs((2, 16, 2, length, length, 128, 128))
    request = AttentionRequest(q, k, v, plan, 0.1)
    first = FfaBackend().forward(request)
    for _ in range(20):
        again = FfaBackend().forward(request)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


def test_only_the_tensor_is_written() -> None:
    """Output rows between others' memory: nothing before, behind or between is touched."""
    length, heads = 75, 8
    dense = make_mask("chunked_local", length).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v = inputs((1, heads, 1, length, length, 128, 128))
    instance = forward_instance(q.dtype, 128, 128, heads, 1, rows=1)
    frame = torch.full((1, heads + 2, length + 32, 192), 7.0, device="cuda", dtype=q.dtype)
    out = frame[:, 1:-1, 16:-16, 32:-32]
    lse = torch.full((3, heads, length), 7.0, device="cuda")
    schedule = forward_schedule(plan, instance)
    ForwardLaunch(instance, q, k, v, out, plan.intervals, schedule, 0.1)(q, k, v, out, lse[1:2], None)
    exact = dense_attention(q, k, v, dense.cuda(), scale=0.1)
    torch.testing.assert_close(out.double(), exact.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[1].double(), exact.lse[0], atol=1e-3, rtol=1e-3)
    out.fill_(7.0)
    lse[1] = 7.0
    assert (frame == 7.0).all() and (lse == 7.0).all()


def test_cuda_graph_replays() -> None:
    length = 700
    dense = make_mask("chunked_local", length).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v = inputs((2, 16, 2, length, length, 128, 128))
    instance = forward_instance(q.dtype, 128, 128, 8, 1, rows=1)
    schedule = forward_schedule(plan, instance)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")

    def launch() -> None:
        ForwardLaunch(instance, q, k, v, out, plan.intervals, schedule, 0.1)(q, k, v, out, lse, None)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed in (1, 2):
        q.copy_(inputs((2, 16, 2, length, length, 128, 128), seed=seed)[0])
        out.fill_(torch.nan)
        graph.replay()
        exact = dense_attention(q, k, v, dense.cuda(), scale=0.1)
        torch.testing.assert_close(out.double(), exact.out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["causal", "document_causal", "query_and_key_padding"])
def test_plans_built_on_the_device(name: str) -> None:
    """Their arrays have room for more row tiles than there are; the kernel counts."""
    length = 1025
    case = make_mask(name, length)
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(case.dense())))
    q, k, v = inputs((max(2, case.batch), 16, 2, length, length, 128, 128))
    before = choose_builder("device")
    try:
        assert has_room(plan)
        check(AttentionRequest(q, k, v, plan, 0.1), case.dense().cuda())
    finally:
        choose_builder(before)


def test_far_memory() -> None:
    """Element offsets beyond 2^31."""
    length, heads, stride = 300, 2, 1 << 30
    memory = torch.empty(3 * stride, device="cuda", dtype=torch.bfloat16)
    q = memory.as_strided((1, heads, length, 64), (0, 2 * stride, 64, 1))
    q.copy_(torch.randn(q.shape, device="cuda"))
    _, k, v = inputs((1, heads, heads, 1, length, 64, 64))
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(make_mask("causal", length).dense())))
    check(AttentionRequest(q, k, v, plan, 0.1), make_mask("causal", length).dense().cuda())
