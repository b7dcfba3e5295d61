"""The Hopper backward kernels against dense float64 attention; skipped where there is no Hopper GPU."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import ffa, ffa_backward
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_backward import BackwardInstance, BackwardLaunch
from magi_flex.kernels.ffa_backward_schedule import make_backward_schedule, plan_backward
from magi_flex.kernels.request import AttentionGradients, AttentionRequest, Multiply, ScoreProgram
from magi_flex.kernels.tile_plans import choose_builder, has_room
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import build_tile_plan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention, dense_attention_with_gradients
from tests.cases.score_steps import step_programs, steps_mod

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(params=["as chosen", "sums"])
def way_to_dq(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the number of keys a row decides, and always by sums beside dk and dv."""
    if request.param == "sums":
        monkeypatch.setattr(ffa, "_FEW_KEYS", dict.fromkeys(ffa._FEW_KEYS, 0))


LENGTHS = (1, 5, 127, 129, 257, 1025, 2046)
Sizes = tuple[int, int, int, int, int, int, int]


def inputs(sizes: Sizes, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output on the GPU for (B, H, G, Q, K, D, E)."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim = sizes
    torch.manual_seed(seed)
    shapes = (
        (batch, heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, v_dim),
        (batch, heads, q_len, v_dim),
    )
    q, k, v, d_out = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v, d_out


def on_gpu(plan: MaskPlan) -> MaskPlan:
    return MaskPlan(RowIntervals(plan.starts.cuda(), plan.ends.cuda(), plan.kv_len))


def poison() -> None:
    memory = torch.full((64 << 20,), float("nan"), device="cuda")
    del memory


def check(request: AttentionRequest, mask: Tensor, d_out: Tensor, d_lse: Tensor | None = None) -> AttentionGradients:
    """Run the backend over poisoned memory and compare with float64 and with dense attention in the same precision."""
    q, k, v = request.q, request.k, request.v
    factor = 1.0
    for step in request.score.steps or ():
        assert isinstance(step, Multiply)
        factor *= step.factor
    exact, rounded = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, mask, scale=request.scale * factor, dtype=dtype)
        for dtype in (torch.float64, q.dtype)
    )
    out = exact.out.to(torch.float32 if request.wide_results else q.dtype)
    poison()
    result = FfaBackend().backward(request, out, exact.lse.float(), d_out, d_lse)
    for name in ("dq", "dk", "dv"):
        actual, source = getattr(result, name), getattr(request, name[1])
        assert actual.shape == source.shape
        assert actual.dtype == (torch.float32 if request.wide_results else source.dtype)
        assert_within_factor(actual, getattr(rounded, name), getattr(exact, name), floor=2e-3)
    assert (result.dq[exact.lse == -torch.inf] == 0).all()
    return result


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("way_to_dq")
def test_every_mask(name: str) -> None:
    for length in (129, 1025):
        case = make_mask(name, length)
        dense = case.dense()
        batch, heads = max(2, case.batch), 8 if case.heads == 1 else case.heads
        kv_heads = 2 if heads % 2 == 0 else heads
        q, k, v, d_out = inputs((batch, heads, kv_heads, length, length, 128, 128), seed=length)
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        check(AttentionRequest(q, k, v, plan, 128**-0.5), dense.cuda(), d_out)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("way_to_dq")
def test_every_length(length: int) -> None:
    for name, other in itertools.product(("full", "causal", "document_causal", "sink_and_window"), (length, 333)):
        dense = make_mask(name, length, other).dense()
        q, k, v, d_out = inputs((len(dense), 16, 2, length, other, 128, 128), seed=length)
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        check(AttentionRequest(q, k, v, plan, 0.1), dense.cuda(), d_out)


@pytest.mark.parametrize(
    "dims",
    [
        (64, 64),
        (56, 64),
        (96, 96),
        (128, 128),
        (72, 120),
        (128, 64),
        (8, 8),
        (192, 128),
        (192, 192),
        (256, 256),
        (200, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("way_to_dq")
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    dense = make_mask("prefix_lm_in_documents", 515).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    for group, wide in ((1, False), (4, True), (6, False)):
        q, k, v, d_out = inputs((2, 2 * group, 2, 515, 515, *dims), dtype, seed=group)
        check(AttentionRequest(q, k, v, plan, dims[0] ** -0.5, wide_results=wide), dense.cuda(), d_out)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
@pytest.mark.parametrize("name", ["full", "causal", "document_causal", "query_and_key_padding"])
@pytest.mark.usefixtures("way_to_dq")
def test_wide_heads(name: str, dims: tuple[int, int]) -> None:
    for length in (129, 1025):
        case = make_mask(name, length)
        dense = case.dense()
        q, k, v, d_out = inputs((max(2, case.batch), 8, 2, length, length, *dims), seed=length)
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        check(AttentionRequest(q, k, v, plan, 0.07), dense.cuda(), d_out)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_fixed_order_of_sums(dims: tuple[int, int]) -> None:
    for name, kv_heads in (("causal", 2), ("document_causal", 8), ("sink_and_window", 1)):
        length = 1025
        case = make_mask(name, length)
        dense = case.dense()
        q, k, v, d_out = inputs((max(2, case.batch), 8, kv_heads, length, length, *dims))
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        request = AttentionRequest(q, k, v, plan, 0.07, deterministic=True)
        first = check(request, dense.cuda(), d_out)
        exact = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense.cuda(), scale=0.07)
        for _ in range(10):
            again = FfaBackend().backward(request, exact.out.to(q.dtype), exact.lse.float(), d_out, None)
            assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("dq", "dk", "dv"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_score_steps(dims: tuple[int, int], deterministic: bool) -> None:
    batch, kv_heads, group, q_len, kv_len = 2, 2, 4, 150, 291
    heads = kv_heads * group
    dense = make_mask("sink_and_window", q_len, kv_len).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v, d_out = inputs((batch, heads, kv_heads, q_len, kv_len, *dims))
    for steps in step_programs(batch, heads, q_len, kv_len, "cuda").values():
        request = AttentionRequest(q, k, v, plan, 0.2, ScoreProgram(steps=steps), deterministic)
        exact, rounded = (
            dense_attention_with_gradients(q, k, v, d_out, None, dense.cuda(), steps_mod(steps), (), 0.2, dtype)
            for dtype in (torch.float64, q.dtype)
        )
        poison()
        result = FfaBackend().backward(request, exact.out.to(q.dtype), exact.lse.float(), d_out, None)
        for name in ("dq", "dk", "dv"):
            assert_within_factor(getattr(result, name), getattr(rounded, name), getattr(exact, name), floor=2e-3)


def test_layouts_and_scales() -> None:
    length = 261
    dense = make_mask("causal", length).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v, d_out = inputs((2, 8, 2, length, length, 128, 128))
    by_row = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    result = check(AttentionRequest(*by_row, plan, 0.1), dense.cuda(), d_out)
    assert [x.stride() for x in (result.dq, result.dk, result.dv)] == [x.stride() for x in by_row]
    packed = torch.randn(2, length, 12, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    check(AttentionRequest(packed[:, :8], packed[:, 8:10], packed[:, 10:], plan, 0.1), dense.cuda(), d_out)
    unaligned = torch.randn(2, 8, length, 129, device="cuda", dtype=torch.bfloat16)[..., 1:]
    check(AttentionRequest(unaligned, k, v, plan, 0.1), dense.cuda(), unaligned)
    check(AttentionRequest(q, k, v, plan, 0.1), dense.cuda(), d_out[:1, :1].expand_as(q))
    for scale, factor in ((-0.1, 1.0), (0.1, -2.0), (0.0, 1.0), (1e-3, 7.0)):
        score = ScoreProgram(steps=(Multiply(factor),))
        check(AttentionRequest(q, k, v, plan, scale, score), dense.cuda(), d_out)


def test_gradient_of_lse() -> None:
    length = 300
    dense = make_mask("query_and_key_padding", length).dense()
    plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
    q, k, v, d_out = inputs((dense.shape[0], 4, 2, length, length, 64, 64))
    d_lse = torch.randn(q.shape[:3], device="cuda")
    d_lse[~dense.any(-1).expand(d_lse.shape)] = torch.nan  # of empty rows: does not matter
    check(AttentionRequest(q, k, v, plan, 0.1), dense.cuda(), d_out, d_lse)


def test_merged_statistics() -> None:
    """out and lse that count other keys too, also for rows without a key in this plan: this part's gradients."""
    length = 400
    dense = make_mask("document_causal", length).dense().cuda()
    part = dense.clone()
    part[..., 200:] = False
    q, k, v, d_out = inputs((len(dense), 4, 2, length, length, 128, 128))
    whole = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense, scale=0.1)
    results = []
    for mask in (part, dense & ~part):
        plan = MaskPlan(RowIntervals.from_dense(mask))
        request = AttentionRequest(q, k, v, plan, 0.1, wide_results=True)
        results.append(FfaBackend().backward(request, whole.out.float(), whole.lse.float(), d_out, None))
    for name in ("dq", "dk", "dv"):
        total, exact = sum(getattr(x, name) for x in results).double(), getattr(whole, name)
        assert (total - exact).norm() < 1e-2 * exact.norm()


def test_no_keys_or_rows() -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k, v, d_out = inputs((1, 2, 2, q_len, kv_len, 64, 64))
        request = AttentionRequest(q, k, v, MaskPlan(RowIntervals.full(q_len, kv_len, "cuda")), 1)
        result = FfaBackend().backward(request, d_out, torch.empty(1, 2, q_len, device="cuda"), d_out, None)
        assert all((x == 0).all() for x in (result.dq, result.dk, result.dv))


def test_many_random_intervals_and_empty_rows() -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        q_len, kv_len = int(torch.randint(1, 700, ())), int(torch.randint(1, 700, ()))
        starts = torch.randint(0, kv_len + 1, (2, 1, 9, q_len), dtype=torch.int32)
        ends = torch.randint(0, kv_len + 1, (2, 1, 9, q_len), dtype=torch.int32)
        ends[..., torch.rand(q_len) < 0.2] = 0
        plan = MaskPlan(RowIntervals.build(starts, ends, kv_len))
        q, k, v, d_out = inputs((2, 8, 2, q_len, kv_len, 128, 128), seed=seed)
        check(AttentionRequest(q, k, v, on_gpu(plan), 0.1), plan.to_dense().cuda(), d_out)


def test_every_way_to_split_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of 1 to all heads of a group, sections that do and do not divide the replicas, runs that begin anywhere."""
    length, batch, heads, kv_heads = 515, 3, 8, 2
    q, k, v, d_out = inputs((batch, heads, kv_heads, length, length, 128, 128))
    instance = BackwardInstance(q.dtype, 128, 128)
    for mask_batch, mask_heads, ragged, run_align in (
        (1, 1, True, 1), (1, 1, True, 8), (3, 1, True, 8), (3, 1, False, 1), (1, 8, False, 1), (3, 8, False, 1)
    ):  # fmt: skip
        masks = [make_mask("document_causal", length, seed=i).dense()[0] for i in range(mask_batch * mask_heads)]
        dense = torch.stack(masks).view(mask_batch, mask_heads, length, length).cuda()
        plan = MaskPlan(RowIntervals.from_dense(dense))
        exact = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense, scale=0.1)
        tiles = build_tile_plan(plan, instance.rows, instance.keys, transposed=True, ragged=ragged, run_align=run_align)
        for split, section in ((4, 100), (2, 1), (2, 5), (1, 7)):
            monkeypatch.setattr(ffa_backward, "L2_BYTES", section * length * 128 * 8)
            schedule = make_backward_schedule(tiles, mask_heads, split)
            results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
            out, lse = exact.out.to(q.dtype), exact.lse.float()
            like = (q, k, v, out, d_out, *results)
            launch = BackwardLaunch(instance, *like, plan.intervals, schedule, 0.1, sm_margin=100)
            launch(q, k, v, out, lse, d_out, None, *results)
            for actual, wanted in zip(results, (exact.dq, exact.dk, exact.dv), strict=True):
                assert (actual.double() - wanted).norm() < 1e-2 * wanted.norm(), (mask_batch, mask_heads, split)


def test_only_the_tensor_is_written() -> None:
    """Gradient rows between others' memory: nothing before, behind or between is touched."""
    length, heads = 75, 8
    dense = make_mask("document_causal", length).dense().cuda()
    plan = MaskPlan(RowIntervals.from_dense(dense))
    q, k, v, d_out = inputs((len(dense), heads, heads, length, length, 128, 128))
    exact = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense, scale=0.1)
    frames = [
        torch.full((len(dense), heads + 2, length + 32, 192), 7.0, device="cuda", dtype=q.dtype) for _ in range(3)
    ]
    inner = [frame[:, 1:-1, 16:-16, 32:-32] for frame in frames]
    schedule = plan_backward(plan, 64, 128, len(dense), heads, heads, 132)
    out, lse = exact.out.to(q.dtype), exact.lse.float()
    instance = BackwardInstance(q.dtype, 128, 128)
    launch = BackwardLaunch(instance, q, k, v, out, d_out, *inner, plan.intervals, schedule, 0.1)
    launch(q, k, v, out, lse, d_out, None, *inner)
    for actual, wanted in zip(inner, (exact.dq, exact.dk, exact.dv), strict=True):
        assert (actual.double() - wanted).norm() < 1e-2 * wanted.norm()
        actual.fill_(7.0)
    assert all((frame == 7.0).all() for frame in frames)


def test_cuda_graph_replays() -> None:
    length = 700
    dense = make_mask("document_causal", length).dense().cuda()
    plan = MaskPlan(RowIntervals.from_dense(dense))
    sizes = (2, 16, 2, length, length, 128, 128)
    q, k, v, d_out = inputs(sizes)
    exact = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense, scale=0.1)
    request, out, lse = AttentionRequest(q, k, v, plan, 0.1), exact.out.to(q.dtype), exact.lse.float()
    schedule = plan_backward(plan, 64, 128, 2, 16, 2, 132)
    results = [torch.empty_like(x) for x in (q, k, v)]
    instance = BackwardInstance(q.dtype, 128, 128)

    kernels = BackwardLaunch(instance, q, k, v, out, d_out, *results, request.plan.intervals, schedule, 0.1)

    def launch() -> None:
        kernels(q, k, v, out, lse, d_out, None, *results)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed in (1, 2):
        d_out.copy_(inputs(sizes, seed=seed)[3])
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        exact = dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=dense, scale=0.1)
        for actual, wanted in zip(results, (exact.dq, exact.dk, exact.dv), strict=True):
            assert (actual.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_forward_and_backward_agree() -> None:
    """The forward kernel's own output and lse."""
    length = 1025
    dense = make_mask("document_causal", length).dense().cuda()
    request = AttentionRequest(
        *inputs((len(dense), 16, 2, length, length, 128, 128))[:3], MaskPlan(RowIntervals.from_dense(dense)), 0.1
    )
    d_out = torch.randn_like(request.q)
    forward = FfaBackend().forward(request)
    torch.testing.assert_close(
        forward.out.double(),
        dense_attention(request.q, request.k, request.v, dense, scale=0.1).out,
        atol=2e-2,
        rtol=2e-2,
    )
    result = FfaBackend().backward(request, forward.out, forward.lse, d_out, None)
    exact = dense_attention_with_gradients(request.q, request.k, request.v, d_out, mask_BHQK=dense, scale=0.1)
    for name in ("dq", "dk", "dv"):
        wanted = getattr(exact, name)
        assert (getattr(result, name).double() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.fixture
def device_plans() -> Generator[None]:
    before = choose_builder("device")
    yield
    choose_builder(before)


@pytest.mark.parametrize("way", ["sums", "two kernels", "fixed order"])
def test_plans_built_on_the_device(way: str, device_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arrays have room for more key tiles than there are; the kernel counts.  Which kernels make dq is known
    there only."""
    most_keys = {"sums": 0, "two kernels": 1025, "fixed order": 0}[way]
    monkeypatch.setattr(ffa, "_FEW_KEYS", {(64, 64): most_keys, (128, 128): most_keys})
    monkeypatch.setattr(ffa, "_LEAST_ITEMS", 0)
    length = 1025
    for name, dim in (("causal", 128), ("document_causal", 128), ("document_causal", 64)):
        dense = make_mask(name, length).dense()
        plan = on_gpu(MaskPlan(RowIntervals.from_dense(dense)))
        q, k, v, d_out = inputs((2, 16, 2, length, length, dim, dim))
        assert has_room(plan)
        check(AttentionRequest(q, k, v, plan, 0.1, deterministic=way == "fixed order"), dense.cuda(), d_out)


def test_few_keys_or_many_in_one_graph(device_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call is replayed on other masks, which want other kernels for dq."""
    monkeypatch.setattr(ffa, "_FEW_KEYS", {(128, 128): 100})
    monkeypatch.setattr(ffa, "_LEAST_ITEMS", 0)
    length = 700
    masks = [make_mask(name, length).dense().cuda() for name in ("causal", "sliding_window")]
    wanted = [RowIntervals.from_dense(mask) for mask in masks]
    assert wanted[1].area() < 100 * length < wanted[0].area()
    plan = MaskPlan(RowIntervals(wanted[0].starts.clone(), wanted[0].ends.clone(), length))
    q, k, v, d_out = inputs((1, 16, 2, length, length, 128, 128))
    request = AttentionRequest(q, k, v, plan, 0.1)
    exact = [dense_attention_with_gradients(q, k, v, d_out, mask_BHQK=mask, scale=0.1) for mask in masks]
    out, lse = exact[0].out.to(q.dtype), exact[0].lse.float()
    FfaBackend().backward(request, out, lse, d_out, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = FfaBackend().backward(request, out, lse, d_out, None)
    for number in (1, 0, 1):
        for target, source in (
            (plan.starts, wanted[number].starts), (plan.ends, wanted[number].ends),
            (out, exact[number].out), (lse, exact[number].lse),
        ):  # fmt: skip
            target.copy_(source)
        graph.replay()
        for name in ("dq", "dk", "dv"):
            right = getattr(exact[number], name)
            assert (getattr(result, name).double() - right).norm() < 1e-2 * right.norm()
