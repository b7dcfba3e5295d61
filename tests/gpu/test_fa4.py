"""flash-attn-4's kernels as backend ``fa4`` uses them, against dense float64 attention; needs a GPU for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import magi_flex
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import fa4, fa4_masks
from magi_flex.kernels.fa4 import Fa4Backend, architecture, head_dim_objection
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
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.fa4_standin import INTERVAL_MASKS

_missing = Fa4Backend().missing(torch.device("cuda"))
pytestmark = pytest.mark.skipif(_missing is not None, reason=str(_missing))

LENGTHS = (1, 5, 127, 129, 257, 1025, 2046)
Dims = tuple[int, int]


def check(
    dense: Tensor,
    heads: tuple[int, int] = (16, 2),
    dims: Dims = (128, 128),
    steps: tuple[ScoreStep, ...] = (),
    score_mod: Any = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "heads",
    with_lse: bool = True,
) -> None:
    """Forward and backward over poisoned memory, against float64 and against dense attention in the same precision."""
    scale = dims[0] ** -0.5 if scale is None else scale
    batch, mask_heads, q_len, kv_len = dense.shape
    batch = max(batch, 2)
    heads = (mask_heads, mask_heads) if mask_heads > 1 else heads
    torch.manual_seed(q_len)

    def tensor(heads: int, rows: int, dim: int) -> Tensor:
        if layout == "rows":
            return torch.randn(batch, rows, heads, dim, device="cuda").to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, rows, dim, device="cuda").to(dtype)

    q, k, v = tensor(heads[0], q_len, dims[0]), tensor(heads[1], kv_len, dims[0]), tensor(heads[1], kv_len, dims[1])
    d_out = tensor(heads[0], q_len, dims[1])
    d_lse = torch.randn(batch, heads[0], q_len, device="cuda") if with_lse else None
    intervals = RowIntervals.from_dense(dense)
    plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), kv_len))
    request = AttentionRequest(q, k, v, plan, scale, ScoreProgram(steps=steps), max_score=False)
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    result = Fa4Backend().forward(request)
    grads = Fa4Backend().backward(request, result.out, result.lse, d_out, d_lse)
    mask = dense.cuda()
    exact, rounded = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, mask, score_mod, (), scale, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
    assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(grads, name), getattr(rounded, name), getattr(exact, name), floor=2e-3)


@pytest.mark.parametrize("name", INTERVAL_MASKS)
def test_every_mask(name: str) -> None:
    for q_len, kv_len in ((515, 515), (300, 1025)):
        check(make_mask(name, q_len, kv_len).dense())


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length: int) -> None:
    for name, other in itertools.product(("full", "causal", "document_causal", "sink_and_window"), (length, 333)):
        check(make_mask(name, length, other).dense())


@pytest.mark.parametrize(
    "dims", [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 8), (128, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims(dims: Dims, dtype: torch.dtype) -> None:
    arch = architecture(torch.device("cuda", 0))
    reason = head_dim_objection(arch, *dims, needs_backward=True)
    if reason is not None:
        pytest.skip(reason)
    for name, heads in (("sink_and_window", (8, 2)), ("causal", (4, 4))):
        check(make_mask(name, 515).dense(), heads, dims, dtype=dtype)


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16])
def test_many_intervals(slots: int) -> None:
    """Rows of that many intervals, cut at odd places; also by column."""
    length = 700
    key = torch.arange(length)
    period = length // slots
    dense = (key % period < period // 2 + 3) & (key - torch.arange(length)[:, None] // 7 > -length // 2)
    check(dense[None, None])


def test_packed_documents() -> None:
    label = torch.repeat_interleave(torch.arange(6), torch.tensor([700, 129, 1, 128, 900, 188]))
    same = label[:, None] == label
    for dense in (same, same.tril()):
        check(dense[None, None], layout="rows")
        check(dense[None, None], layout="rows", with_lse=False)
        check(dense[None, None], layout="heads")


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(4, 600 + 700 - 1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", ["full", "lower_right_causal", "sink_and_window"])
def test_score_steps(name: str, group: int) -> None:
    dense = make_mask(name, 600, 700).dense()
    slopes, table = SLOPES.cuda(), TABLE.cuda()
    for steps, mod in (
        ((Multiply(2.0),), lambda s, b, h, q, k: 2 * s),
        ((Softcap(5.0),), lambda s, b, h, q, k: 5 * torch.tanh(s / 5)),
        ((Distance(-slopes, True),), lambda s, b, h, q, k: s - slopes[h.cuda()] * (q - k).abs().cuda()),
        (
            (Multiply(0.5), Bias(table.flatten(), (0, 1299, 1, -1), 699), Softcap(3.0)),
            lambda s, b, h, q, k: 3 * torch.tanh((0.5 * s + table[h.cuda(), (q - k + 699).cuda()]) / 3),
        ),
    ):
        check(dense, (4, 4 // group), (64, 64), steps, mod)


def test_score_steps_in_packed_documents() -> None:
    """Where a mod reads no more than differences of places, documents stay packed sequences."""
    label = torch.repeat_interleave(torch.arange(3), torch.tensor([300, 129, 171]))
    dense = (label[:, None] == label).tril()[None, None]
    slopes, table = SLOPES.cuda(), TABLE.cuda()
    for steps, mod in (
        ((Softcap(5.0),), lambda s, b, h, q, k: 5 * torch.tanh(s / 5)),
        ((Distance(-slopes, True),), lambda s, b, h, q, k: s - slopes[h.cuda()] * (q - k).abs().cuda()),
        (
            (Bias(table.flatten(), (0, 1299, 1, -1), 699),),
            lambda s, b, h, q, k: s + table[h.cuda(), (q - k + 699).cuda()],
        ),
    ):
        check(dense, (4, 2), (128, 128), steps, mod, layout="rows")


@pytest.mark.parametrize("name", ["causal", "sink_and_window", "document"])
def test_later_calls_are_launches_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's interface, on other tensors of the same layout."""
    dense = make_mask(name, 777).dense()[:1]
    intervals = RowIntervals.from_dense(dense)
    plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), 777))
    interface = fa4.package().interface
    for call in range(3):
        torch.manual_seed(call)
        q, k, v, d_out = (
            torch.randn(1, 777, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in (8, 2, 2, 8)
        )
        request = AttentionRequest(q, k, v, plan, 0.1, max_score=False)
        with monkeypatch.context() as patched:
            if call:
                for function in ("_flash_attn_fwd", "_flash_attn_bwd"):
                    patched.setattr(interface, function, None)
            result = Fa4Backend().forward(request)
            grads = Fa4Backend().backward(request, result.out, result.lse, d_out, None)
        exact, rounded = (
            dense_attention_with_gradients(q, k, v, d_out, None, dense.cuda(), None, (), 0.1, dtype)
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
        for part in ("dq", "dk", "dv"):
            assert_within_factor(getattr(grads, part), getattr(rounded, part), getattr(exact, part), floor=2e-3)


def test_scales_and_layouts() -> None:
    dense = make_mask("causal", 261).dense()
    check(dense, scale=-0.1)
    check(dense, scale=0.0)
    check(dense, layout="rows")
    check(make_mask("sink_and_window", 261).dense(), scale=-0.1)


def test_the_package_s_own_calls_are_as_they_were() -> None:
    """Ours write logarithms to base 2; whoever calls the package gets natural ones."""
    q, k, v = (torch.randn(1, 300, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    intervals = RowIntervals.from_dense(make_mask("causal", 300).dense()[:1])
    plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), 300))
    request = AttentionRequest(*(x.transpose(1, 2) for x in (q, k, v)), plan, 0.1, max_score=False)
    forward = fa4.package().interface._flash_attn_fwd
    for _ in range(2):
        _, natural, *_ = forward(q, k, v, softmax_scale=0.1, causal=True, return_lse=True)
        ours = Fa4Backend().forward(request).lse
        torch.testing.assert_close(ours, natural * fa4.LOG2_E, atol=1e-5, rtol=1e-5)


def _gated(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    return torch.where((q - k) % 3 == 0, s * torch.sigmoid(table[q]), s - 0.1 * table[k] ** 2)


def _bucketed(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    """Distances in buckets that widen, as T5's; larger scores are pressed together."""
    distance = (q - k).abs()
    wide = 8 + (torch.log((distance + 1).float() / 8) * 4).to(torch.int32)
    bucket = torch.where(distance < 8, distance, torch.clamp(wide, 0, 31))
    return torch.where(s > 1, 1 + torch.log(s.clamp(min=1)), s) + table[bucket * 4 + h]


@pytest.mark.parametrize("general", [_gated, _bucketed])
def test_a_general_score_mod_and_new_masks_compile_nothing(general: Any) -> None:
    """Compiled flex_attention; documents that change each step, with a graph that no simple steps describe."""
    interface = fa4.package().interface
    table = torch.rand(1024, device="cuda")

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return general(s, b, h, q, k, table)

    torch._dynamo.reset()
    function = torch.compile(flex_attention, fullgraph=True)
    compiled: list[int] = []
    with magi_flex.enable(backend="fa4"):
        for seed in range(4):
            case = make_mask("prefix_lm_in_documents", 1024, seed=seed)
            doc = case.dense().cuda()[0, 0]
            block_mask = create_block_mask(lambda b, h, q, k, doc=doc: doc[q, k], None, None, 1024, 1024)
            q, k, v = (torch.randn(1, n, 1024, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = function(*leaves, score_mod=mod, block_mask=block_mask, enable_gqa=True)
            d_out = torch.randn_like(out)
            grads = torch.autograd.grad(out, leaves, d_out)
            exact, rounded = (
                dense_attention_with_gradients(
                    *(x.detach() for x in leaves), d_out, None, doc[None, None],
                    lambda s, b, h, q, k: mod(s, *(x.cuda() for x in (b, h, q, k))), dtype=dtype,
                )
                for dtype in (torch.float64, torch.bfloat16)
            )  # fmt: skip
            assert_within_factor(out, rounded.out, exact.out, floor=1e-3)
            for got, name in zip(grads, ("dq", "dk", "dv"), strict=True):
                assert_within_factor(got, getattr(rounded, name), getattr(exact, name), floor=2e-3)
            caches = (interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache)
            compiled.append(sum(len(cache.cache) for cache in caches))
    assert len(set(compiled)) == 1


def test_bits_are_what_single_scores_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of whole lines, against the same mask_mod called score by score."""
    intervals = RowIntervals.from_dense(make_mask("shared_prefix", 1025).dense())
    q, k, v = (torch.randn(1, n, 1025, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    results = []
    original = fa4.mask_arguments
    for as_bits in (True, False):
        plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), 1025))  # launches are kept with it
        request = AttentionRequest(q, k, v, plan, 0.1, max_score=False)
        with monkeypatch.context() as patched:
            patched.setattr(fa4, "mask_arguments", lambda *args, b=as_bits, **kw: original(*args, **kw, as_bits=b))
            result = Fa4Backend().forward(request)
            grads = Fa4Backend().backward(request, result.out, result.lse, torch.ones_like(result.out), None)
            results.append((result.out, result.lse, grads.dk, grads.dv))
    for name, x, y in zip(("out", "lse", "dk", "dv"), *results, strict=True):
        if name in ("out", "lse"):
            assert torch.equal(x, y)
        else:  # sums over a group's heads in no fixed order
            torch.testing.assert_close(x, y, atol=1e-2, rtol=2e-2)


def test_a_captured_graph_replays_on_new_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured nothing may be read back; lists then have room for every block."""
    length = 900
    first, second = (make_mask("document_causal", length, seed=seed).dense()[:1] for seed in (0, 1))
    starts, ends = (torch.zeros(1, 1, 1, length, dtype=torch.int32, device="cuda") for _ in range(2))
    q, k, v = (torch.randn(1, n, length, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals(starts, ends, length)), 0.125, max_score=False)

    def fill(dense: Tensor) -> None:
        intervals = RowIntervals.from_dense(dense)
        starts.copy_(intervals.starts)
        ends.copy_(intervals.ends)

    fill(first)
    monkeypatch.setattr(fa4_masks, "structure_of", lambda plan: None)  # so that the captured kernel is compiled here
    Fa4Backend().forward(request)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = Fa4Backend().forward(request)
    except RuntimeError as error:
        pytest.xfail(f"the plan is not made without transfers: {error}")
    for dense in (second, first):
        fill(dense)
        graph.replay()
        exact = dense_attention_with_gradients(q, k, v, torch.ones_like(q), None, dense.cuda(), None, (), 0.125)
        torch.testing.assert_close(result.out.double(), exact.out, atol=2e-2, rtol=2e-2)
