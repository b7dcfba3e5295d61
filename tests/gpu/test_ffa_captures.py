"""Gradients of what score mods capture in the Hopper kernels, against dense float64 attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import magi_flex
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.request import AttentionRequest, IndexMap, ScoreProgram
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import make_mask
from tests.cases.reference import AttentionWithGradients, assert_within_factor, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, ScoreMod, make_score_mod
from tests.cases.score_programs import traced_score
from tests.gpu.test_ffa_score_mods import on_gpu
from tests.test_ffa_emulated import all_kinds

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 8, 2, 150, 291
Bind = Callable[..., ScoreMod]


def inputs(
    dims: tuple[int, int], q_len: int, kv_len: int, dtype: torch.dtype, batch: int = BATCH
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, on the CPU."""
    torch.manual_seed(sum(dims) + q_len)
    q, k = torch.randn(batch, HEADS, q_len, dims[0]), torch.randn(batch, KV_HEADS, kv_len, dims[0])
    v, d_out = torch.randn(batch, KV_HEADS, kv_len, dims[1]), torch.randn(batch, HEADS, q_len, dims[1])
    return q.to(dtype), k.to(dtype), v.to(dtype), d_out.to(dtype)


def references(
    tensors: Sequence[Tensor], mask: Tensor | None, bind: Bind, captures: Sequence[Tensor], scale: float
) -> tuple[AttentionWithGradients, AttentionWithGradients]:
    """In float64 and in the precision of the tensors."""
    found = []
    for dtype in (torch.float64, tensors[0].dtype):
        leaves = [
            x.detach().to(torch.promote_types(x.dtype, dtype)).requires_grad_(x.requires_grad)
            if x.is_floating_point()
            else x
            for x in captures
        ]
        wanted = [x for x in leaves if x.requires_grad]
        found.append(dense_attention_with_gradients(*tensors, None, mask, bind(*leaves), wanted, scale, dtype))
    return found[0], found[1]


def check(
    bind: Bind,
    captures: Sequence[Tensor],
    dims: tuple[int, int] = (64, 64),
    mask: str = "document_causal",
    lengths: tuple[int, int] = (Q_LEN, KV_LEN),
    dtype: torch.dtype = torch.bfloat16,
    score: ScoreProgram | None = None,
) -> None:
    """``score``: where its mod sees other indices than ``bind``."""
    tensors, dense = inputs(dims, *lengths, dtype), make_mask(mask, *lengths).dense()
    exact, rounded = references(tensors, dense, bind, captures, 0.2)
    intervals = RowIntervals.from_dense(dense)
    plan = MaskPlan(RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), lengths[1]))
    score = on_gpu(score or traced_score(bind, captures, learned=True))
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    q, k, v, d_out = (x.cuda() for x in tensors)
    request = AttentionRequest(q, k, v, plan, 0.2, score)
    result = FfaBackend().forward(request)
    found = FfaBackend().backward(request, result.out, result.lse, d_out, None)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(found, name).cpu(), getattr(rounded, name), getattr(exact, name), floor=2e-3)
    grads = [x for x in found.captures if x is not None]
    learned = [x for x in captures if x.requires_grad]
    for grad, capture, near, right in zip(grads, learned, rounded.captures, exact.captures, strict=True):
        assert grad.dtype == capture.dtype and grad.shape == capture.shape and grad.device == q.device
        assert_within_factor(grad.cpu(), near, right, floor=2e-3)


def learned(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(len(shapes))
    return [torch.rand(shape).add(0.2).requires_grad_() for shape in shapes]


LEARNED = sorted(name for name in SCORE_MODS if make_score_mod(name, 1, 2, 5).learned)


@pytest.mark.parametrize("name", LEARNED)
def test_every_score_mod(name: str) -> None:
    case = make_score_mod(name, BATCH, HEADS, Q_LEN, KV_LEN)
    names = list(case.captures)
    check(lambda *x: case.bind(dict(zip(names, x, strict=True))), [case.captures[n] for n in names])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (192, 192)], ids=str)
@pytest.mark.parametrize("lengths", [(150, 291), (257, 129), (1, 5)], ids=str)
def test_all_kinds_of_sums(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    shapes = ((HEADS,), (HEADS, 16), (max(lengths),), (1, HEADS, q_len, kv_len), (2, HEADS, kv_len), (13,))
    check(all_kinds, learned(*shapes), dims, "sink_and_window" if dims[0] == 64 else "document_causal", lengths)


@pytest.mark.parametrize("dim", [64, 128])
def test_many_pairs_of_few_elements(dim: int) -> None:
    """A thousand rows and keys add to a scalar, a slope a head, three elements, and a table by distance."""

    def bind(scalar: Tensor, slopes: Tensor, three: Tensor, table: Tensor) -> ScoreMod:
        return mods.chain(
            mods.temperature(scalar), mods.alibi(slopes), lambda s, b, h, q, k: s + three[(q // 64 + k // 64) % 3],
            lambda s, b, h, q, k: s + table[q - k],
        )  # fmt: skip

    captures = [torch.tensor(0.7), torch.rand(HEADS) * 0.01, torch.randn(3), torch.randn(2049)]
    check(bind, [x.requires_grad_() for x in captures], (dim, dim), "causal", (1025, 1025), torch.float16)


def test_index_maps() -> None:
    """The mod sees the places of a shard; what is a distance there is none for the kernel."""
    rows, keys = torch.randperm(Q_LEN) * 2, torch.randperm(KV_LEN)
    table, slopes = learned((HEADS + 3, 16), (HEADS + 3,))

    def bind(table: Tensor, slopes: Tensor) -> ScoreMod:
        return mods.chain(mods.t5_bias(table, 40, True), mods.alibi(slopes))

    def seen(table: Tensor, slopes: Tensor) -> ScoreMod:
        mod = bind(table, slopes)
        return lambda score, b, h, q, k: mod(score, b + 1, h + 3, rows[q], keys[k])

    index_map = IndexMap(1, 3, rows.cuda().to(torch.int32), keys.cuda())
    check(seen, [table, slopes], score=traced_score(bind, (table, slopes), index_map, learned=True))


def softcapped_t5(table: Tensor, slopes: Tensor) -> ScoreMod:
    """With a constant softcap, which the forward runs as the processor's approximate step."""
    return mods.chain(mods.softcap(20.0), mods.t5_bias(table), mods.alibi(slopes))


@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_training(mode: str) -> None:
    torch._dynamo.reset()
    size = 300

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, slopes: Tensor) -> Tensor:
        return flex_attention(q, k, v, softcapped_t5(table, slopes), scale=0.2, enable_gqa=True)

    function = attention if mode == "eager" else torch.compile(attention, mode=mode, fullgraph=True)
    tensors = inputs((64, 64), size, size, torch.bfloat16, 1)
    d_out = tensors[3].cuda()
    with magi_flex.enable(backend="ffa"):
        for step in range(3):
            table = torch.randn(HEADS, 32, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
            slopes = (mods.alibi_slopes(HEADS) * (step + 1)).requires_grad_()
            leaves = [x.detach().cuda().requires_grad_() for x in (*tensors[:3], table, slopes)]
            torch.compiler.cudagraph_mark_step_begin()
            out = function(*leaves)
            found = [x.clone() for x in torch.autograd.grad(out, leaves, d_out)]
            exact, rounded = references(tensors, None, softcapped_t5, [table, slopes], 0.2)
            for x, near, right in zip(
                found,
                (rounded.dq, rounded.dk, rounded.dv, *rounded.captures),
                (exact.dq, exact.dk, exact.dv, *exact.captures),
                strict=True,
            ):
                assert_within_factor(x.cpu(), near, right, floor=2e-3)


def test_in_a_cuda_graph() -> None:
    """The sums begin at zero in every replay."""
    captures = learned((HEADS, 32), (HEADS,))
    score = on_gpu(traced_score(lambda t, x: mods.chain(mods.t5_bias(t), mods.alibi(x)), captures, learned=True))
    q, k, v, d_out = (x.cuda() for x in inputs((64, 64), 200, 200, torch.bfloat16))
    ends = torch.arange(1, 201, dtype=torch.int32, device="cuda").view(1, 1, 1, -1)
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals(torch.zeros_like(ends), ends, 200)), 0.2, score)

    def gradients() -> tuple[Tensor | None, ...]:
        result = FfaBackend().forward(request)
        return FfaBackend().backward(request, result.out, result.lse, d_out, None).captures

    gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = gradients()
    for _ in range(3):
        score.captures[0].copy_(torch.randn(HEADS, 32))
        graph.replay()
        for x, y in zip(in_graph, gradients(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)  # sums in no fixed order
