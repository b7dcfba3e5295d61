"""The C++ kernels against a float64 dense reference.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cpu import CpuBackend
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Bias,
    Distance,
    IndexMap,
    Multiply,
    RequestFacts,
    ScoreProgram,
    ScoreStep,
    Softcap,
)
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients

BACKEND = CpuBackend()
pytestmark = pytest.mark.skipif(
    BACKEND.missing(torch.device("cpu")) is not None, reason=str(BACKEND.missing(torch.device("cpu")))
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised tensor is full of NaN, so that nothing may be left unwritten."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def random_inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_len * 7 + kv_len + dim)
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def run(
    request: AttentionRequest, d_out: Tensor, d_lse: Tensor | None = None
) -> tuple[AttentionOutput, AttentionGradients]:
    output = BACKEND.forward(request)
    return output, BACKEND.backward(request, output.out, output.lse, d_out, d_lse)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_BHQK: Tensor,
    plan: MaskPlan | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    steps: tuple[ScoreStep, ...] = (),
    index_map: IndexMap | None = None,
    factor: float = 2.0,
) -> None:
    """Forward and backward, with a gradient through lse, have at most twice the error of dense attention.

    (Beside two units in the last place of the largest value: the errors of a few numbers are accidents.)
    """
    plan = MaskPlan.from_dense(mask_BHQK) if plan is None else plan
    program = ScoreProgram(steps=steps, index_map=index_map or IndexMap())
    request = AttentionRequest(q, k, v, plan, q.shape[-1] ** -0.5, program)
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype)
    d_lse = torch.randn(q.shape[:3], generator=generator)
    output, grads = run(request, d_out, d_lse)
    dense = [
        dense_attention_with_gradients(q, k, v, d_out, d_lse, mask_BHQK, score_mod, dtype=dtype)
        for dtype in (q.dtype, torch.float64)
    ]
    pairs = {name: getattr(output, name) for name in ("out", "lse", "max_score")}
    pairs |= {name: getattr(grads, name) for name in ("dq", "dk", "dv")}
    for name, actual in pairs.items():
        same_precision, reference = (getattr(result, name) for result in dense)
        try:
            assert_within_factor(actual, same_precision, reference, factor, floor=2.4e-7)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert output.out.dtype == q.dtype and output.lse.dtype == torch.float32
    assert [x.dtype for x in (grads.dq, grads.dk, grads.dv)] == [q.dtype] * 3


def causal_plan(q_len: int, kv_len: int) -> MaskPlan:
    ends = torch.arange(1, q_len + 1, dtype=torch.int32).clamp(max=kv_len).view(1, 1, 1, -1)
    return MaskPlan(RowIntervals(torch.zeros_like(ends), ends, kv_len))


def causal_mask(q_len: int, kv_len: int) -> Tensor:
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()[None, None]


# ---- masks and sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(257, 257), (127, 330)])
def test_every_mask(name: str, q_len: int, kv_len: int) -> None:
    case = make_mask(name, q_len, kv_len)
    heads = case.heads if case.heads > 1 else 2
    q, k, v = random_inputs(case.batch, heads, heads, q_len, kv_len, 16, 16, torch.float32)
    check(q, k, v, case.dense())


@pytest.mark.parametrize("size", [1, 5, 127, 129, 257, 1025, 2046])
@pytest.mark.parametrize("name", ["causal", "sink_and_window", "document_causal", "natten_2d", "dense_table"])
def test_odd_sizes(name: str, size: int) -> None:
    case = make_mask(name, size)
    q, k, v = random_inputs(case.batch, 1, 1, size, size, 24, 24, torch.float32)
    check(q, k, v, case.dense())


@pytest.mark.parametrize("name", ["dilated", "bigbird", "selected_tokens", "temporal_head", "dense_table"])
def test_many_intervals_instead_of_bit_tiles(name: str) -> None:
    case = make_mask(name, 300, 411)
    intervals = RowIntervals.from_dense(case.dense())
    assert intervals.max_intervals > 4
    q, k, v = random_inputs(1, 2, 2, 300, 411, 16, 16, torch.float32)
    check(q, k, v, case.dense(), MaskPlan(intervals))


def test_bit_tiles_are_really_used() -> None:
    case = make_mask("dense_table", 400, 500)
    plan = MaskPlan.from_dense(case.dense())
    assert plan.bit_tiles is not None and (plan.bit_tiles.slot >= 0).any()
    q, k, v = random_inputs(2, 3, 3, 400, 500, 16, 16, torch.float32)
    check(q, k, v, case.dense(), plan)


def test_random_masks_that_change_with_batch_and_head() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(6):
        q_len, kv_len = (int(x) for x in torch.randint(1, 400, (2,), generator=generator))
        block = 1 + 40 * (trial % 3)
        coarse = torch.rand(2, 6, -(-q_len // block), -(-kv_len // block), generator=generator) < 0.4
        mask = coarse.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :q_len, :kv_len]
        q, k, v = random_inputs(2, 6, 2, q_len, kv_len, 16, 8, torch.float32)
        check(q, k, v, mask)


def test_keys_outside_of_every_interval_are_never_read() -> None:
    q, k, v = random_inputs(1, 2, 2, 100, 300, 16, 16, torch.float32)
    mask = torch.zeros(1, 1, 100, 300, dtype=torch.bool)
    mask[..., 37:190] = True
    expected, expected_grads = run(
        AttentionRequest(q, k, v, MaskPlan.from_dense(mask), 0.25), torch.ones(1, 2, 100, 16)
    )
    for x in (k, v):
        x[:, :, :37] = math.nan
        x[:, :, 190:] = math.nan
    output, grads = run(AttentionRequest(q, k, v, MaskPlan.from_dense(mask), 0.25), torch.ones(1, 2, 100, 16))
    assert torch.equal(output.out, expected.out) and torch.equal(grads.dq, expected_grads.dq)
    assert torch.equal(grads.dk, expected_grads.dk) and torch.equal(grads.dv, expected_grads.dv)


# ---- shapes, dtypes, layouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "v_dim"),
    [(16, 16), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (1, 3), (33, 17), (7, 130)],
)
def test_head_dims_and_dtypes(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(1, 2, 1, 131, 140, dim, v_dim, dtype)
    # Dense products of one or three numbers hardly round at all.
    check(q, k, v, causal_mask(131, 140), factor=2.0 if dim > 1 else 4.0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (5, 5)])
def test_head_ratios(heads: int, kv_heads: int) -> None:
    case = make_mask("causal", 129)
    mask = case.dense().expand(1, heads, -1, -1).clone()
    mask[:, 1::2, :, :7] = False  # indexed by the query head
    q, k, v = random_inputs(2, heads, kv_heads, 129, 129, 32, 32, torch.bfloat16)
    check(q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_expanded_inputs(dtype: torch.dtype) -> None:
    batch, heads, length, dim = 2, 4, 150, 24
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(batch, heads, dim, length, generator=generator).to(dtype).transpose(2, 3)  # last stride not 1
    v = torch.randn(batch, 1, 2 * length, 2 * dim, generator=generator).to(dtype)[..., ::2, 3 : 3 + dim]
    v = v.expand(batch, heads, length, dim)
    check(q, k, v, causal_mask(length, length))
    plan = causal_plan(length, length)
    d_out = torch.ones(1, 1, 1, 1, dtype=dtype).expand(batch, heads, length, dim)
    output, grads = run(AttentionRequest(q, k, v, plan, 0.2), d_out)
    assert output.out.stride() == q.stride() and grads.dq.stride() == q.stride()
    dense = [x.contiguous() for x in (q, k, v)]
    expected, expected_grads = run(AttentionRequest(*dense, plan, 0.2), d_out.contiguous())
    assert torch.equal(output.out, expected.out) and torch.equal(output.lse, expected.lse)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(grads, name), getattr(expected_grads, name)), name


def test_offsets_beyond_two_to_the_31() -> None:
    length, dim, stride = 3, 8, 2**30
    storage = torch.empty_strided((1, 1, length, dim), (1, 1, stride, 1), dtype=torch.bfloat16)  # virtual memory only
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, dim, generator=generator).to(torch.bfloat16) for _ in range(3))
    storage.copy_(k)
    plan = causal_plan(length, length)
    expected, got = (BACKEND.forward(AttentionRequest(q, key, v, plan, 0.3)) for key in (k, storage))
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0), (1, 2, 0, 0)])
def test_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    q, k, v = random_inputs(batch, heads, heads, q_len, kv_len, 16, 16, torch.float32)
    plan = MaskPlan(RowIntervals.full(q_len, kv_len))
    output, grads = run(AttentionRequest(q, k, v, plan, 1.0), torch.randn(batch, heads, q_len, 16))
    assert output.out.shape == q.shape and (output.out == 0).all() and (output.lse == -math.inf).all()
    assert all((x == 0).all() for x in (grads.dq, grads.dk, grads.dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_results(dtype: torch.dtype) -> None:
    q, k, v = random_inputs(1, 2, 2, 90, 90, 32, 32, dtype)
    request = AttentionRequest(q, k, v, causal_plan(90, 90), 0.2, wide_results=True)
    d_out = torch.randn(1, 2, 90, 32)
    output, grads = run(request, d_out)
    assert all(x.dtype == torch.float32 for x in (output.out, grads.dq, grads.dk, grads.dv))
    wide = replace(request, q=q.float(), k=k.float(), v=v.float())
    expected, expected_grads = run(wide, d_out)
    torch.testing.assert_close(output.out, expected.out)
    torch.testing.assert_close(grads.dk, expected_grads.dk)


# ---- rows without keys, non-finite numbers, repeatability -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_keys(dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, 200, 180, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[:, :, 3:150:2] = False
    mask[1] = False
    q, k, v = random_inputs(2, 2, 2, 200, 180, 16, 16, dtype)
    check(q, k, v, mask)
    request = AttentionRequest(q, k, v, MaskPlan.from_dense(mask), 0.25)
    empty = ~mask.any(-1).expand(2, 2, 200)
    output = BACKEND.forward(request)
    assert (output.out[empty] == 0).all()
    assert (output.lse[empty] == -math.inf).all() and (output.max_score[empty] == -math.inf).all()
    d_out, d_lse = torch.ones_like(output.out), torch.zeros(2, 2, 200)
    d_out[empty], d_lse[empty] = math.nan, math.inf  # what flows into an empty row goes nowhere
    grads = BACKEND.backward(request, output.out, output.lse, d_out, d_lse)
    assert (grads.dq[empty] == 0).all()
    assert all(x.isfinite().all() for x in (grads.dq, grads.dk, grads.dv))


def test_a_row_finite_elsewhere_but_empty_here() -> None:
    """Partial results across ranks: lse and out of the merged row, no key of it in this plan."""
    q, k, v = random_inputs(1, 1, 1, 4, 6, 16, 16, torch.float32)
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals.empty(4, 6)), 0.25, wide_results=True)
    grads = BACKEND.backward(request, torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4), torch.randn(1, 1, 4, 16), None)
    assert all((x == 0).all() for x in (grads.dq, grads.dk, grads.dv))


def test_key_sets_merge_to_the_whole() -> None:
    """Backward over parts of the keys with the merged out and lse adds up to the backward over all keys."""
    q, k, v = random_inputs(1, 2, 2, 140, 200, 16, 16, torch.float32)
    whole = MaskPlan.from_dense(make_mask("causal", 140, 200).dense())
    request = AttentionRequest(q, k, v, whole, 0.25)
    d_out = torch.randn(1, 2, 140, 16)
    output, grads = run(request, d_out)
    dq, dk, dv = torch.zeros_like(q), [], []
    for keys in torch.arange(200).split(90):
        part = replace(request, k=k[:, :, keys], v=v[:, :, keys], plan=MaskPlan(whole.intervals.take_keys(keys)))
        partial = BACKEND.backward(part, output.out, output.lse, d_out, None)
        dq += partial.dq
        dk.append(partial.dk)
        dv.append(partial.dv)
    torch.testing.assert_close(dq, grads.dq, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(dk, 2), grads.dk, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(dv, 2), grads.dv, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_inputs_show(bad: float) -> None:
    """Rows that attend to a non-finite score or value are non-finite; no other row or column suffers.

    (As in dense attention, a value's own column may: masked, its weight is 0, and 0 * NaN is NaN.)
    """
    q, k, v = random_inputs(1, 1, 1, 50, 50, 16, 16, torch.float32)
    q[0, 0, 20, 3] = bad
    v[0, 0, 30, 5] = bad
    output = BACKEND.forward(AttentionRequest(q, k, v, causal_plan(50, 50), 0.25))
    assert output.out[0, 0, 20].isnan().all() and output.lse[0, 0, 20].isnan()
    assert not output.out[0, 0, 30:, 5].isfinite().any()
    finite = output.out.isfinite()[0, 0]
    finite[20] = finite[:, 5] = True
    assert finite.all() and output.lse[0, 0, 21:].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random_inputs(1, 1, 1, 40, 40, 16, 16, torch.float32)
    check(q * 300, k * 300, v, causal_mask(40, 40))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3)])
def test_results_repeat_bit_for_bit(heads: int, kv_heads: int) -> None:
    """Also where row tiles are split among threads, and the forward for any number of threads."""
    q, k, v = random_inputs(1, heads, kv_heads, 1500, 1500, 16, 16, torch.float32)
    request = AttentionRequest(q, k, v, causal_plan(1500, 1500), 0.25)
    d_out = torch.randn(1, heads, 1500, 16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        first, first_grads = run(request, d_out)
        for _ in range(3):
            output, grads = run(request, d_out)
            assert torch.equal(output.out, first.out)
            assert all(torch.equal(getattr(grads, n), getattr(first_grads, n)) for n in ("dq", "dk", "dv"))
        torch.set_num_threads(1)
        output, grads = run(request, d_out)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(output.out, first.out) and torch.equal(grads.dq, first_grads.dq)
    torch.testing.assert_close(grads.dk, first_grads.dk, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads.dv, first_grads.dv, rtol=1e-5, atol=1e-5)


# ---- score steps ----------------------------------------------------------------------------------------------------

B, H, Q, K = 2, 4, 150, 170


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SLOPES = -torch.rand(H, generator=_generator())
PAIR_BIAS = torch.randn(B, H, Q, K, generator=_generator())
RELATIVE = torch.randn(H, Q + K, generator=_generator())
KEY_BIAS = torch.randn(B, K, generator=_generator())

SCORE_CASES: dict[str, tuple[tuple[ScoreStep, ...], Callable[..., Tensor]]] = {
    "multiply": ((Multiply(0.7),), lambda s, b, h, q, k: s * 0.7),
    "softcap": ((Softcap(1.5),), lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5)),
    "softcap_wide": ((Softcap(50.0),), lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0)),
    "alibi": (
        (Distance(SLOPES, absolute=True),),
        lambda s, b, h, q, k: s + SLOPES.to(s.dtype)[h] * (q - k).abs(),
    ),
    "distance_shared_slope": (
        (Distance(SLOPES[:1], absolute=False),),
        lambda s, b, h, q, k: s + SLOPES[0].to(s.dtype) * (k - q),
    ),
    "pair_bias": (
        (Bias(PAIR_BIAS, PAIR_BIAS.stride(), 0, 0.5),),  # type: ignore[arg-type]
        lambda s, b, h, q, k: s + 0.5 * PAIR_BIAS.to(s.dtype)[b, h, q, k],
    ),
    "relative_table": (
        (Bias(RELATIVE, (0, Q + K, 1, -1), K),),
        lambda s, b, h, q, k: s + RELATIVE.to(s.dtype)[h, q - k + K],
    ),
    "key_bias_bfloat16": (
        (Bias(KEY_BIAS.bfloat16(), (K, 0, 0, 1), 0),),
        lambda s, b, h, q, k: s + KEY_BIAS.bfloat16().to(s.dtype)[b, k],
    ),
    "key_bias_float16": (
        (Bias(KEY_BIAS.half(), (K, 0, 0, 1), 0),),
        lambda s, b, h, q, k: s + KEY_BIAS.half().to(s.dtype)[b, k],
    ),
    "all_in_turn": (
        (Multiply(0.5), Softcap(2.0), Multiply(1.3), Distance(SLOPES, True), Bias(KEY_BIAS, (K, 0, 0, 1), 0)),
        lambda s, b, h, q, k: (
            1.3 * 2 * torch.tanh(s * 0.5 / 2) + SLOPES.to(s.dtype)[h] * (q - k).abs() + KEY_BIAS.to(s.dtype)[b, k]
        ),
    ),
}


@pytest.mark.parametrize("name", SCORE_CASES)
def test_score_steps(name: str) -> None:
    steps, score_mod = SCORE_CASES[name]
    q, k, v = random_inputs(B, H, 2, Q, K, 16, 24, torch.float32)
    check(q, k, v, make_mask("sink_and_window", Q, K).dense(), score_mod=score_mod, steps=steps)


def test_score_steps_in_bfloat16() -> None:
    steps, score_mod = SCORE_CASES["all_in_turn"]
    q, k, v = random_inputs(B, H, 2, Q, K, 64, 64, torch.bfloat16)
    check(q, k, v, causal_mask(Q, K), score_mod=score_mod, steps=steps)


def test_bias_of_minus_infinity_masks() -> None:
    bias = torch.zeros(Q, K)
    bias[torch.rand(Q, K, generator=_generator()) < 0.5] = -math.inf
    bias[11] = -math.inf  # a row with nothing left
    q, k, v = random_inputs(B, H, 2, Q, K, 16, 16, torch.float32)
    steps = (Bias(bias, (0, 0, K, 1), 0),)
    check(q, k, v, causal_mask(Q, K), score_mod=lambda s, b, h, q, k: s + bias.to(s.dtype)[q, k], steps=steps)


def test_index_map() -> None:
    """A shard sees the names of its rows, keys, batch entries and heads in the whole."""
    q_index, k_index = (torch.randperm(n, generator=_generator()) for n in (Q, K))
    slopes, bias = torch.rand(H + 2, generator=_generator()), torch.randn(B + 1, H + 2, Q, K, generator=_generator())
    steps = (Distance(slopes, absolute=True), Bias(bias, bias.stride(), 0))  # type: ignore[arg-type]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h, q, k = b + 1, h + 2, q_index[q], k_index[k]
        return s + slopes.to(s.dtype)[h] * (q - k).abs() + bias.to(s.dtype)[b, h, q, k]

    q, k, v = random_inputs(B, H, 2, Q, K, 16, 16, torch.float32)
    index_map = IndexMap(1, 2, q_index, k_index)
    check(q, k, v, causal_mask(Q, K), score_mod=score_mod, steps=steps, index_map=index_map)


def test_a_table_read_out_of_its_bounds() -> None:
    """Harmless where the pair is masked, an error where it attends."""
    table = torch.randn(64, generator=_generator())
    q, k, v = random_inputs(1, 1, 1, 64, 64, 16, 16, torch.float32)
    steps = (Bias(table, (0, 0, 1, -1), 0),)  # q - k: negative above the diagonal

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table.to(s.dtype)[(q - k).clamp(min=0)]

    check(q, k, v, causal_mask(64, 64), score_mod=score_mod, steps=steps)
    full = MaskPlan(RowIntervals.full(64, 64))
    with pytest.raises(IndexError, match="outside of its bounds"):
        BACKEND.forward(AttentionRequest(q, k, v, full, 0.25, ScoreProgram(steps)))


# ---- what it refuses ------------------------------------------------------------------------------------------------

FACTS = RequestFacts(
    device=torch.device("cpu"),
    dtype=torch.float32,
    head_dim=64,
    v_head_dim=64,
    q_heads=8,
    kv_heads=8,
    score_steps=(Softcap,),
    score_grads=False,
    needs_backward=True,
    has_bit_tiles=True,
)


def test_objections() -> None:
    assert BACKEND.objections(FACTS) == []
    assert "float64" in BACKEND.objections(replace(FACTS, dtype=torch.float64))[0]
    assert BACKEND.objections(replace(FACTS, score_steps=None))
    assert BACKEND.objections(replace(FACTS, score_grads=True))
    assert BACKEND.objections(replace(FACTS, score_grads=True, needs_backward=False)) == []
    assert BACKEND.missing(torch.device("cuda")) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 2, 9, 8)}, r"key: is \[1, 2, 9, 8\]"),
        ({"v": torch.zeros(1, 2, 8, 16)}, r"value: is \[1, 2, 8, 16\]"),
        ({"v": torch.zeros(1, 2, 9, 16, dtype=torch.float64)}, "v: is torch.float64"),
        ({"q": torch.zeros(1, 3, 7, 16)}, "query: has 3 heads"),
        ({"q": torch.zeros(1, 4, 8, 16)}, "block_mask: is for 7 queries and 9 keys"),
        ({"plan": MaskPlan(RowIntervals.full(7, 10))}, "block_mask: is for 7 queries and 10 keys"),
        ({"plan": MaskPlan.from_dense(torch.ones(1, 3, 7, 9, dtype=torch.bool))}, "block_mask: was made for H=3"),
        ({"score": ScoreProgram((Distance(torch.ones(3), True),))}, "3 slopes for 4 heads"),
        ({"score": ScoreProgram(None)}, "no native steps"),
    ],
)
def test_bad_requests(change: dict[str, object], message: str) -> None:
    good = AttentionRequest(
        torch.zeros(1, 4, 7, 16),
        torch.zeros(1, 2, 9, 16),
        torch.zeros(1, 2, 9, 16),
        MaskPlan(RowIntervals.full(7, 9)),
        1.0,
    )
    BACKEND.forward(good)
    with pytest.raises(ValueError, match=message):
        BACKEND.forward(replace(good, **change))  # type: ignore[arg-type]
