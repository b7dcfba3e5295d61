"""General score mods in the Hopper kernels, forward and backward, against dense float64 attention."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import magi_flex
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.request import AttentionRequest, Backend, IndexMap, ScoreProgram
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, ScoreMod, make_score_mod
from tests.cases.score_programs import program_of_case, traced_score

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 8, 2, 150, 291


def on_gpu(score: ScoreProgram) -> ScoreProgram:
    captures = tuple(x.cuda() if isinstance(x, Tensor) else x for x in score.captures)
    return replace(score, captures=captures)


def check(
    score: ScoreProgram, mod: ScoreMod, dims: tuple[int, int] = (64, 64), mask: str = "sink_and_window",
    deterministic: bool = False,
) -> None:  # fmt: skip
    """``mod`` is the same function of whole index tensors, on the CPU in float64."""
    torch.manual_seed(sum(dims))
    dtype = torch.bfloat16
    q = torch.randn(BATCH, HEADS, Q_LEN, dims[0]).to(dtype)
    k = torch.randn(BATCH, KV_HEADS, KV_LEN, dims[0]).to(dtype)
    v, d_out = (
        torch.randn(BATCH, KV_HEADS, KV_LEN, dims[1]).to(dtype),
        torch.randn(BATCH, HEADS, Q_LEN, dims[1]).to(dtype),
    )
    dense = make_mask(mask, Q_LEN, KV_LEN).dense()
    exact, rounded = (
        dense_attention_with_gradients(q, k, v, d_out, None, dense, mod, (), 0.2, kind)
        for kind in (torch.float64, dtype)
    )
    intervals = RowIntervals.from_dense(dense)
    plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), KV_LEN))
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    request = AttentionRequest(q.cuda(), k.cuda(), v.cuda(), plan, 0.2, on_gpu(score), deterministic)
    result = FfaBackend().forward(request)
    assert_within_factor(result.out.cpu(), rounded.out, exact.out, floor=1e-3)
    assert_within_factor(result.lse.cpu(), rounded.lse, exact.lse, floor=1e-4)
    gradients = FfaBackend().backward(request, result.out, result.lse, d_out.cuda(), None)
    for name in ("dq", "dk", "dv"):
        actual = getattr(gradients, name).cpu()
        assert_within_factor(actual, getattr(rounded, name), getattr(exact, name), floor=2e-3)


@pytest.mark.parametrize("name", sorted(set(SCORE_MODS) - {"identity"}))
def test_every_score_mod(name: str) -> None:
    case = make_score_mod(name, BATCH, HEADS, Q_LEN, KV_LEN)
    check(program_of_case(case), case.bind(case.captures_as(torch.float64)))


def mixed(table: Tensor, scalar: Tensor, number: int) -> ScoreMod:
    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = torch.where((q - k) % 3 == 0, torch.tanh(score), score * torch.exp(-0.1 * (q // 2 - k).abs()))
        return near * scalar + table[h, (k + number) % 7].to(score.dtype) - torch.sigmoid(score) * (b + 1)

    return mod


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_head_dims(dims: tuple[int, int], deterministic: bool) -> None:
    captures = (torch.randn(HEADS, 7).to(torch.bfloat16), torch.tensor(0.7))
    score = traced_score(functools.partial(mixed, number=3), captures)
    check(score, mixed(captures[0], captures[1].double(), 3), dims, "causal", deterministic)


def test_index_maps() -> None:
    """The mod sees the places of a shard: later batch entries and heads, rows and keys in another order."""
    rows, keys = torch.randperm(Q_LEN) * 2, torch.randperm(KV_LEN) + 40
    table = torch.randn(HEADS + 5, 700)
    index_map = IndexMap(1, 5, rows.cuda().to(torch.int32), keys.cuda())

    def bind(table: Tensor) -> ScoreMod:
        return lambda score, b, h, q, k: score * (b + 1) + table[h, q + k].to(score.dtype) - 0.01 * (q - k).abs()

    def seen(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bind(table.double())(score, b + 1, h + 5, rows[q], keys[k])

    check(traced_score(bind, (table,), index_map), seen)


def test_new_numbers_are_no_new_kernels() -> None:
    from magi_flex.kernels import ffa_forward

    def bind(scalar: Tensor) -> ScoreMod:
        return lambda score, b, h, q, k: torch.tanh(score) * scalar + 0.25 * score

    score = traced_score(bind, (torch.tensor(1.0),))
    check(score, bind(torch.tensor(1.0, dtype=torch.float64)))
    loaded = ffa_forward.load_kernel.cache_info().misses
    for value in (0.5, -2.0):
        check(replace(score, captures=(torch.tensor(value),)), bind(torch.tensor(value, dtype=torch.float64)))
    assert ffa_forward.load_kernel.cache_info().misses == loaded


@pytest.mark.parametrize("backend", [FfaBackend(), TritonBackend()], ids=lambda x: x.name)
def test_in_cuda_graphs(backend: Backend) -> None:
    """Constant tensors and tables by distance are there before; what is captured is read anew."""

    def bind(table: Tensor) -> ScoreMod:
        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            constant = torch.tensor([0.5, -1.0, 2.0], device=table.device)
            return mods.t5_bias(table)(score, b, h, q, k) + constant[(q + k) % 3]

        return mod

    table = torch.randn(HEADS, 32)
    score = on_gpu(traced_score(bind, (table,)))
    (captured,) = score.captures
    torch.manual_seed(0)
    q, k, v, d_out = (
        torch.randn(1, heads, 200, 64, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    ends = torch.arange(1, 201, dtype=torch.int32, device="cuda").view(1, 1, 1, -1)
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals(torch.zeros_like(ends), ends, 200)), 0.2, score, True)

    def both() -> tuple[Tensor, ...]:
        result = backend.forward(request)
        gradients = backend.backward(request, result.out, result.lse, d_out, None)
        return result.out, gradients.dq, gradients.dk, gradients.dv

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = both()
    for _ in range(2):
        captured.copy_(torch.randn(HEADS, 32))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(in_graph, both(), strict=True))


def test_in_compiled_cuda_graphs() -> None:
    """What is kept for a mod lies outside of the pools of torch.compile's graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    size = 256

    def biased(table: Tensor) -> ScoreMod:
        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            constant = torch.tensor([0.5, -1.0, 2.0], device=table.device)
            return mods.t5_bias(table)(score, b, h, q, k) + constant[(q + k) % 3]

        return mod

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return flex_attention(q, k, v, biased(table), scale=0.2, enable_gqa=True)

    q, k, v, d_out = (
        torch.randn(1, heads, size, 64, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    for x in (q, k, v):
        x.requires_grad_()
    with magi_flex.enable(backend="ffa"):
        function = torch.compile(attention, mode="reduce-overhead", fullgraph=True)
        other = torch.compile(lambda x: (x * 2 + 1).sin() @ x.cos(), mode="reduce-overhead")
        for step in range(5):
            table = torch.randn(HEADS, 32, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            out = function(q, k, v, table)
            got = [out.clone(), *(x.clone() for x in torch.autograd.grad(out, (q, k, v), d_out))]
            other(torch.randn(size, size, device="cuda") + step)  # a graph that shares the pool
            dense = torch.ones(1, 1, size, size, dtype=torch.bool)
            near, exact = (
                dense_attention_with_gradients(
                    *(x.detach().cpu() for x in (q, k, v, d_out)), None, dense, biased(table.cpu()), (), 0.2, kind
                )
                for kind in (torch.bfloat16, torch.float64)
            )
            for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
                assert_within_factor(x.cpu(), getattr(near, name), getattr(exact, name), floor=2e-3)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
