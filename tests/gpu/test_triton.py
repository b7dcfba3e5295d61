"""The Triton kernels on a GPU, against dense float64 attention; skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import magi_flex
from magi_flex import op_specs
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import route, triton_backend
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Bias,
    Distance,
    ScoreProgram,
    Softcap,
)
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import BitTiles, MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, make_score_mod
from tests.compiling import attend

KERNEL = TritonBackend()
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or KERNEL.missing(torch.device("cuda")) is not None, reason="needs a GPU with Triton"
)
LENGTHS = (1, 5, 127, 129, 257, 1025, 2046)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(plan: MaskPlan) -> MaskPlan:
    intervals = RowIntervals(plan.starts.cuda(), plan.ends.cuda(), plan.kv_len)
    bits = plan.bit_tiles
    if bits is not None:
        bits = BitTiles(bits.q_tile, bits.kv_tile, *(x.cuda() for x in (bits.row_ptr, bits.cols, bits.slot, bits.bits)))
    return MaskPlan(intervals, bits)


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v, d_out."""
    torch.manual_seed(q_len * 7 + kv_len)
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, v_dim),
        (batch, heads, q_len, v_dim),
    )
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def check(
    request: AttentionRequest, d_out: Tensor, dense: Tensor, d_lse: Tensor | None = None, floor: float | None = None
) -> tuple[AttentionOutput, AttentionGradients]:
    """Run it over poisoned memory and compare with float64 and with dense attention in the same precision."""
    q, k, v = request.q, request.k, request.v
    if floor is None:
        floor = 1e-5 if q.dtype == torch.float32 else 2e-3
    for value in (math.nan, math.inf):
        poison = torch.full((256 << 20,), value, device="cuda")
        del poison
    result = KERNEL.forward(request)
    gradients = KERNEL.backward(request, result.out, result.lse, d_out, d_lse)
    dense = dense.cuda()
    exact, same = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, dense, None, (), request.scale, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    assert_within_factor(result.out, same.out, exact.out, floor=floor)
    for name in ("lse", "max_score"):
        assert_within_factor(getattr(result, name), getattr(same, name), getattr(exact, name), floor=1e-5)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(gradients, name), getattr(same, name), getattr(exact, name), floor=floor)
    return result, gradients


@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_mask(name: str) -> None:
    for lengths in ((1025, 1025), (257, 700)):
        case = make_mask(name, *lengths)
        dense = case.dense()
        heads, kv_heads = (case.heads, 1) if case.heads > 1 else (8, 2)
        q, k, v, d_out = inputs(max(2, case.batch), heads, kv_heads, *lengths, 64, 64, torch.bfloat16)
        check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125), d_out, dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    for name, other in (("causal", length), ("sink_and_window", 333), ("full", length)):
        dense = make_mask(name, length, other).dense()
        q, k, v, d_out = inputs(1, 4, 2, length, other, 64, 64, dtype)
        check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125), d_out, dense)


HEAD_DIMS = ((128, 128), (192, 128), (1, 1), (16, 16), (40, 24), (72, 80), (96, 96), (256, 256), (512, 512))
FEW_HEAD_DIMS = ((128, 128), (40, 24), (512, 512))  # every new one compiles three kernels


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [(dims, torch.bfloat16) for dims in HEAD_DIMS]
    + [(dims, dtype) for dtype in (torch.float32, torch.float16) for dims in FEW_HEAD_DIMS],
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    dense = make_mask("document_causal", 300).dense()
    q, k, v, d_out = inputs(2, 4, 2, 300, 300, *dims, dtype)
    check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), dims[0] ** -0.5), d_out, dense)


@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (4, 4)])
def test_masks_that_differ_between_batch_entries_and_heads(heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(2, heads[0], 300, 400, generator=generator).cumsum(3) < 60
    dense[1, 0] = False
    q, k, v, d_out = inputs(2, *heads, 300, 400, 64, 64, torch.bfloat16)
    check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125), d_out, dense)
    dense = torch.rand(2, heads[0], 300, 400, generator=generator) < 0.3  # bit tiles
    check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125), d_out, dense)


def test_wide_results_lse_gradient_and_empty_rows() -> None:
    dense = torch.zeros(2, 1, 400, 400, dtype=torch.bool)
    dense[0] = torch.ones(400, 400, dtype=torch.bool).tril()
    dense[0, :, 100:110] = False
    q, k, v, d_out = inputs(2, 4, 2, 400, 400, 64, 64, torch.bfloat16)
    d_lse = torch.randn(2, 4, 400, device="cuda")
    d_lse[1] = d_lse[0, :, 100:110] = math.nan
    plan = on_gpu(MaskPlan.from_dense(dense))
    result, gradients = check(AttentionRequest(q, k, v, plan, 0.125, wide_results=True), d_out, dense, d_lse)
    assert result.out.dtype == gradients.dq.dtype == gradients.dk.dtype == torch.float32
    assert (result.out[1] == 0).all() and (gradients.dk[1] == 0).all() and (gradients.dq[0, :, 100:110] == 0).all()


@pytest.fixture
def always_hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hopper kernels take all that they can, with few programs; returns which ran."""
    hopper = triton_backend._hopper_launch(torch.device("cuda", torch.cuda.current_device()))
    if hopper is None:
        pytest.skip("needs a Hopper GPU and a release of Triton that the kernels are for")
    monkeypatch.setattr(hopper, "pays", lambda q: True)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 3)
    launched = []
    for name in ("forward", "backward_kv", "backward_q"):
        launch = getattr(hopper, name)
        monkeypatch.setattr(hopper, name, lambda *args, n=name, f=launch: launched.append(n) or f(*args))
    return launched


@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_mask_on_hopper(name: str, always_hopper: list[str]) -> None:
    for lengths in ((1025, 1025), (257, 700)):
        case = make_mask(name, *lengths)
        dense = case.dense()
        heads, kv_heads = (case.heads, case.heads) if case.heads > 1 else (8, 2)
        q, k, v, d_out = inputs(max(2, case.batch), heads, kv_heads, *lengths, 64, 64, torch.bfloat16)
        check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125), d_out, dense)
    assert len(always_hopper) == 6


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_on_hopper(length: int, always_hopper: list[str]) -> None:
    for name, other in (("causal", length), ("sink_and_window", 333), ("full", length)):
        dense = make_mask(name, length, other).dense()
        q, k, v, d_out = inputs(1, 4, 2, length, other, 128, 128, torch.float16)
        check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), -0.09), d_out, dense)
    assert len(always_hopper) == 9


@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (16, 16), (40, 24), (72, 80), (24, 96)])
def test_head_dims_on_hopper(dims: tuple[int, int], always_hopper: list[str]) -> None:
    dense = make_mask("document_causal", 300).dense()
    q, k, v, d_out = inputs(2, 4, 2, 300, 300, *dims, torch.bfloat16)
    check(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), dims[0] ** -0.5), d_out, dense)
    assert len(always_hopper) == 3


@pytest.mark.parametrize("kind", ["softcap", "distance", "bias"])
def test_score_steps_on_hopper(kind: str, always_hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plain kernels, which other tests compare with float64."""
    q, k, v, d_out = inputs(2, 4, 2, 300, 411, 128, 128, torch.bfloat16)
    slopes, table = torch.rand(4, device="cuda"), torch.randn(300, 411, device="cuda")
    plan = on_gpu(MaskPlan.from_dense(make_mask("sink_and_window", 300, 411).dense()))
    step = {"softcap": Softcap(2.0), "distance": Distance(slopes, True), "bias": Bias(table, (0, 0, 411, 1), 0, 0.5)}[
        kind
    ]
    request = AttentionRequest(q, k, v, plan, 0.1, ScoreProgram((step,)))
    got = run(request, d_out)
    monkeypatch.setattr(triton_backend, "_hopper_launch", lambda device: None)
    for one, two in zip(got, run(request, d_out), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
    assert always_hopper == ["forward", "backward_kv", "backward_q"]


def run(request: AttentionRequest, d_out: Tensor) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv."""
    result = KERNEL.forward(request)
    gradients = KERNEL.backward(request, result.out, result.lse, d_out, None)
    return result.out, result.lse, gradients.dq, gradients.dk, gradients.dv


@pytest.mark.parametrize("q_len", [1, 2, 16])
def test_decoding(q_len: int) -> None:
    kv_len = 70_000
    starts = torch.tensor([0, 1000]).view(2, 1, 1, 1).expand(2, 1, 1, q_len)
    ends = torch.tensor([kv_len, 50_001]).view(2, 1, 1, 1).expand(2, 1, 1, q_len)
    plan = on_gpu(MaskPlan(RowIntervals.build(starts, ends, kv_len)))
    for dtype, heads in ((torch.bfloat16, (32, 4)), (torch.float32, (4, 4))):
        q, k, v, _ = inputs(2, *heads, q_len, kv_len, 128, 128, dtype)
        result = KERNEL.forward(AttentionRequest(q, k, v, plan, 0.1))
        dense = plan.to_dense()
        exact, same = (dense_attention(q, k, v, dense, None, 0.1, kind) for kind in (torch.float64, dtype))
        assert_within_factor(result.out, same.out, exact.out, floor=1e-4)
        assert_within_factor(result.lse, same.lse, exact.lse, floor=1e-5)


def test_layouts() -> None:
    dense = make_mask("chunked_local", 261).dense()
    plan = on_gpu(MaskPlan.from_dense(dense))
    packed = torch.randn(2, 261, 12, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    d_out = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 8, 261, 64)
    result, _ = check(AttentionRequest(packed[:, :8], packed[:, 8:10], packed[:, 10:], plan, 0.1), d_out, dense)
    assert result.out.stride() == (8 * 261 * 64, 64, 8 * 64, 1)
    q, k, v, d_out = inputs(2, 8, 2, 261, 261, 64, 64, torch.bfloat16)
    columns = q.transpose(2, 3).contiguous().transpose(2, 3)
    unaligned = torch.randn(2, 8, 261, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    for x in (columns, unaligned):
        check(AttentionRequest(x, k[:1].expand(2, -1, -1, -1), v, plan, 0.1), d_out, dense)


def test_far_memory() -> None:
    """Element offsets beyond 2^31, in every operand and in rows as well as heads."""
    length, heads = 300, 2
    memory = torch.empty(6 << 30, device="cuda", dtype=torch.bfloat16)
    by_head = memory.as_strided((1, heads, length, 64), (0, 5 << 29, 64, 1))
    by_row = memory.as_strided((1, heads, length, 64), (0, 128, 1 << 24, 1), 1 << 20)
    dense = make_mask("causal", length).dense()
    plan = on_gpu(MaskPlan.from_dense(dense))
    q, k, v, d_out = inputs(1, heads, heads, length, length, 64, 64, torch.bfloat16)
    for far in (by_head, by_row):
        for place in range(4):
            operands = [q, k, v, d_out]
            far.copy_(operands[place])
            operands[place] = far
            check(AttentionRequest(*operands[:3], plan, 0.125), operands[3], dense)


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeated_runs_agree_bitwise(deterministic: bool) -> None:
    plan = on_gpu(MaskPlan.from_dense(make_mask("chunked_local", 2046).dense()))
    q, k, v, d_out = inputs(2, 16, 2, 2046, 2046, 128, 128, torch.bfloat16)
    score = ScoreProgram(steps=(Softcap(20.0),))
    request = AttentionRequest(q, k, v, plan, 0.1, score, deterministic=deterministic)
    first = KERNEL.forward(request)
    first_gradients = KERNEL.backward(request, first.out, first.lse, d_out, None)
    for _ in range(10):
        again = KERNEL.forward(request)
        gradients = KERNEL.backward(request, first.out, first.lse, d_out, None)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(first_gradients, name), getattr(gradients, name))


@pytest.fixture
def by_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Score mods run by their graphs."""
    monkeypatch.setattr(op_specs, "build_steps", lambda *args: None)
    with magi_flex.enable(backend="triton"):
        yield


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("name", sorted(SCORE_MODS))
def test_score_mods(name: str, steps: bool, request: pytest.FixtureRequest) -> None:
    """Eager calls, with gradients of what the mods capture, on the float64 reference of the CPU."""
    if not steps:
        request.getfixturevalue("by_graphs")
    q_len, kv_len = 150, 291
    case = make_score_mod(name, 2, 4, q_len, kv_len)
    exact_captures = case.captures_as(torch.float64)
    device_captures = {n: x.detach().cuda().requires_grad_(n in case.learned) for n, x in case.captures.items()}
    mask_case = make_mask("causal", q_len, kv_len)
    q, k, v, d_out = inputs(2, 4, 2, q_len, kv_len, 64, 64, torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    learned = [device_captures[n] for n in case.learned]
    with magi_flex.enable(backend="triton"):
        block_mask = magi_flex.create_block_mask(mask_case.mask_mod, None, None, q_len, kv_len, device="cuda")
        mod = case.bind(device_captures)
        if name == "soft_document":
            pytest.skip("captures a CPU tensor")
        out = attend(*leaves, mod, block_mask)
        gradients = torch.autograd.grad(out, [*leaves, *learned], d_out)
    cpu = [x.detach().cpu() for x in (q, k, v, d_out)]
    exact = dense_attention_with_gradients(
        *cpu, None, mask_case.dense(), case.bind(exact_captures), [exact_captures[n] for n in case.learned]
    )
    near_captures = case.captures_as(torch.float32)
    near = dense_attention_with_gradients(
        *cpu, None, mask_case.dense(), case.bind(near_captures), [near_captures[n] for n in case.learned],
        dtype=torch.float32,
    )  # fmt: skip
    names = ("dq", "dk", "dv")
    assert_within_factor(out.cpu(), near.out, exact.out, floor=1e-5)
    for got, one, two in zip(
        gradients,
        [*(getattr(near, n) for n in names), *near.captures],
        [*(getattr(exact, n) for n in names), *exact.captures],
        strict=True,
    ):
        assert_within_factor(got.cpu(), one, two, floor=1e-5)


def test_compiled_training_step() -> None:
    length = 1000
    mask_case = make_mask("sliding_window", length)
    q, k, v, d_out = inputs(1, 8, 2, length, length, 64, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with magi_flex.enable(backend="triton"):
        block_mask = magi_flex.create_block_mask(mask_case.mask_mod, None, None, length, length, device="cuda")
        out = torch.compile(attend, fullgraph=True)(*leaves, None, block_mask)
        gradients = torch.autograd.grad(out, leaves, d_out)
    dense = mask_case.dense().cuda()
    exact, same = (
        dense_attention_with_gradients(*(x.detach() for x in leaves), d_out, None, dense, dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    for got, name in zip((out, *gradients), ("out", "dq", "dk", "dv"), strict=True):
        assert_within_factor(got, getattr(same, name), getattr(exact, name), floor=2e-3)


def test_only_few_kernels_serve_all_masks() -> None:
    """A mask of other contents, or of fewer intervals, compiles nothing."""
    from magi_flex.kernels.triton_forward import forward_kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in forward_kernel.device_caches.values())

    counts = []
    for name in (
        "sink_and_window",
        "causal",
        "document_causal",
        "sliding_window",
        "chunked_local",
        "bidirectional_local",
    ):
        dense = make_mask(name, 600).dense()[:1]
        q, k, v, _ = inputs(1, 4, 2, 600, 600, 64, 64, torch.bfloat16)
        KERNEL.forward(AttentionRequest(q, k, v, on_gpu(MaskPlan.from_dense(dense)), 0.125))
        counts.append(compiled())
    assert counts[-1] - counts[0] <= 1  # one for R = 2, one for R = 1


@pytest.fixture(autouse=True, scope="module")
def _routes_anew() -> Iterator[None]:
    route.route.cache_clear()
    yield
    route.route.cache_clear()
