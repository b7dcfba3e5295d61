"""The Triton kernels, interpreted, against dense float64 attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import magi_flex
from inductor_lowering.tile_program import score_program
from magi_flex import op_specs
from magi_flex.kernels import route, triton_configs, triton_launch
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Bias,
    Distance,
    IndexMap,
    Multiply,
    ScoreProgram,
    ScoreStep,
    Softcap,
)
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention, dense_attention_with_gradients
from tests.cases.score_mods import ScoreMod, make_score_mod
from tests.compiling import attend, check_training, qkv

KERNEL = TritonBackend()


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int, dtype=torch.float32
) -> list[Tensor]:
    """q, k, v, d_out."""
    generator = torch.Generator().manual_seed(q_len * 7 + kv_len)
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, v_dim),
        (batch, heads, q_len, v_dim),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(
    request: AttentionRequest,
    d_out: Tensor,
    dense: Tensor,
    d_lse: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    floor: float = 1e-6,
) -> tuple[AttentionOutput, AttentionGradients]:
    q, k, v = request.q, request.k, request.v
    result = KERNEL.forward(request)
    gradients = KERNEL.backward(request, result.out, result.lse, d_out, d_lse)
    exact, same = (
        dense_attention_with_gradients(q, k, v, d_out, d_lse, dense, score_mod, (), request.scale, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    for name in ("out", "lse", "max_score"):
        assert_within_factor(getattr(result, name), getattr(same, name), getattr(exact, name), floor=floor)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(gradients, name), getattr(same, name), getattr(exact, name), floor=floor)
    return result, gradients


MASK_NAMES = ("full", "nothing", "causal", "sliding_window", "document_causal", "sink_and_window", "key_padding")


@pytest.mark.parametrize("name", MASK_NAMES)
def test_masks(name: str) -> None:
    lengths = (129, 129) if name == "document_causal" else (40, 70)
    case = make_mask(name, *lengths)
    dense = case.dense()
    q, k, v, d_out = inputs(case.batch, max(2, case.heads), 1, *lengths, 16, 16)
    check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25), d_out, dense)


@pytest.mark.parametrize("length", [1, 33])
def test_odd_sizes_and_head_dims(length: int) -> None:
    for dim, v_dim, other in ((1, 3, length), (20, 40, 37)):
        dense = make_mask("lower_right_causal", length, other).dense()
        q, k, v, d_out = inputs(1, 3, 3, length, other, dim, v_dim)
        check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.3), d_out, dense)


def test_bit_tiles() -> None:
    dense = torch.rand(1, 2, 150, 270, generator=torch.Generator().manual_seed(0)) < 0.3
    dense[:, :, 128:, 128:256] = True
    dense[0, 1, :128, 200:] = True
    plan = MaskPlan.from_dense(dense)
    assert plan.bit_tiles is not None and (plan.bit_tiles.slot < 0).any()
    q, k, v, d_out = inputs(1, 2, 1, 150, 270, 16, 16)
    check(AttentionRequest(q, k, v, plan, 0.25), d_out, dense)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_masks_that_differ_between_batch_entries_and_heads(kv_heads: int) -> None:
    dense = torch.rand(2, 4, 30, 40, generator=torch.Generator().manual_seed(1)).cumsum(3) < 12
    dense[1, 2] = False
    q, k, v, d_out = inputs(2, 4, kv_heads, 30, 40, 16, 16)
    check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25), d_out, dense)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 2.0])
def test_scales(scale: float) -> None:
    dense = make_mask("chunked_local", 70).dense()
    q, k, v, d_out = inputs(1, 2, 1, 70, 70, 16, 16)
    check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), scale), d_out, dense, floor=2e-6)


def test_half_precision_and_wide_results() -> None:
    dense = make_mask("document_causal", 40).dense()[:1]
    q, k, v, d_out = inputs(1, 2, 1, 40, 40, 16, 24, torch.float16)
    result, gradients = check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25), d_out, dense, floor=1e-3)
    assert result.out.dtype == gradients.dk.dtype == torch.float16 and result.lse.dtype == torch.float32
    wide = AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25, wide_results=True)
    result, gradients = check(wide, d_out, dense, floor=1e-3)
    assert {x.dtype for x in (result.out, gradients.dq, gradients.dk, gradients.dv)} == {torch.float32}


def test_gradient_through_lse_and_empty_rows() -> None:
    dense = torch.zeros(2, 1, 80, 80, dtype=torch.bool)
    dense[0] = torch.ones(80, 80, dtype=torch.bool).tril()
    dense[0, :, 40:50] = False
    q, k, v, d_out = inputs(2, 2, 2, 80, 80, 16, 16)
    d_lse = torch.randn(2, 2, 80)
    d_lse[1] = d_lse[0, :, 40:50] = math.nan  # the gradient of a row without keys must not matter
    result, gradients = check(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25), d_out, dense, d_lse)
    assert (result.out[1] == 0).all() and (result.lse[1] == -math.inf).all()
    assert (result.max_score[0, :, 40:50] == -math.inf).all()
    assert all((x[1] == 0).all() for x in (gradients.dq, gradients.dk, gradients.dv))


def test_layouts() -> None:
    """Results follow the inputs' stride order; expanded, sliced and transposed inputs; nothing beside them is read."""
    dense = make_mask("causal", 20).dense()
    plan = MaskPlan.from_dense(dense)
    memory = torch.full((2, 20, 4, 48), math.nan)
    memory[:, :, :, 16:32] = torch.randn(2, 20, 4, 16)
    packed = memory[..., 16:32].transpose(1, 2)
    q, k, v = packed[:, :2], packed[:, 2:3], packed[:, 3:]
    d_out = torch.ones(()).expand(2, 2, 20, 16)
    result, gradients = check(AttentionRequest(q, k, v, plan, 0.25), d_out, dense)
    assert result.out.stride() == (2 * 20 * 16, 16, 2 * 16, 1)
    columns = torch.randn(2, 2, 16, 20).transpose(2, 3)
    check(AttentionRequest(columns, k[:1].expand(2, -1, -1, -1), v, plan, 0.25), d_out, dense)


def test_nan_is_not_hidden() -> None:
    dense = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    q, k, v, _ = inputs(1, 1, 1, 70, 70, 16, 16)
    k[:, :, 45] = math.nan
    result = KERNEL.forward(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25))
    assert result.out[:, :, :45].isfinite().all() and result.out[:, :, 45:].isnan().all()
    assert result.lse[:, :, 45:].isnan().all()
    low = torch.ones_like(k)
    low[:, :, :64] = -math.inf  # scores of -inf have no weight, be it a whole tile of them
    everything = MaskPlan.from_dense(torch.ones(1, 1, 70, 70, dtype=torch.bool))
    result = KERNEL.forward(AttentionRequest(q.abs(), low, v, everything, 0.25))
    assert result.out.isfinite().all() and result.lse.isfinite().all()
    q[:, :, 3] = math.nan  # all scores of a row
    result = KERNEL.forward(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25))
    assert result.out[:, :, 3].isnan().all() and result.lse[:, :, 3].isnan().all()


def test_no_keys_no_rows_no_batch() -> None:
    for batch, q_len, kv_len in ((1, 5, 0), (1, 0, 5), (0, 5, 5)):
        q, k, v, d_out = inputs(batch, 2, 1, q_len, kv_len, 8, 8)
        request = AttentionRequest(q, k, v, MaskPlan.from_dense(torch.ones(1, 1, q_len, kv_len) > 0), 1.0)
        result = KERNEL.forward(request)
        gradients = KERNEL.backward(request, result.out, result.lse, d_out, None)
        assert (result.out == 0).all() and (result.lse == -math.inf).all() and (result.max_score == -math.inf).all()
        for got, x in zip((gradients.dq, gradients.dk, gradients.dv), (q, k, v), strict=True):
            assert got.shape == x.shape and (got == 0).all()


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("name", ["lower_right_causal", "key_padding"])
def test_few_queries_share_a_tile_and_split_their_keys(q_len: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(triton_configs, "_STEPS_OF_A_SPLIT", 1)
    case = make_mask(name, q_len, 330)
    dense = case.dense()
    dense[0, 0, -1] &= q_len == 1  # and an empty row beside others
    q, k, v, _ = inputs(case.batch, 8, 2, q_len, 330, 16, 24)
    assert triton_configs.packing(q_len, 4, 1, 32)[1] == 4 and triton_configs.split_count(2, 330, 64, 8) > 1
    result = KERNEL.forward(AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25))
    exact, same = (dense_attention(q, k, v, dense, None, 0.25, dtype) for dtype in (torch.float64, torch.float32))
    for part in ("out", "lse", "max_score"):
        assert_within_factor(getattr(result, part), getattr(same, part), getattr(exact, part), floor=1e-6)


def modified(score: Tensor, q: Tensor, k: Tensor, h: Tensor, b: Tensor, steps: tuple[ScoreStep, ...]) -> Tensor:
    for step in steps:
        match step:
            case Multiply(factor):
                score = score * factor
            case Softcap(cap):
                score = cap * torch.tanh(score / cap)
            case Distance(slopes, absolute):
                distance = (k - q).abs() if absolute else k - q
                score = score + slopes.to(score.dtype)[h % slopes.numel()] * distance
            case Bias(table, (sb, sh, sq, sk), offset, factor):
                score = score + factor * table.flatten().to(score.dtype)[offset + b * sb + h * sh + q * sq + k * sk]
    return score


def test_simple_steps() -> None:
    q_len, kv_len, heads = 24, 40, 2
    dense = make_mask("sink_and_window", q_len, kv_len).dense()
    q, k, v, d_out = inputs(2, heads, 1, q_len, kv_len, 16, 16)
    pair = torch.randn(2, heads, q_len, kv_len)
    key = torch.randn(kv_len).to(torch.float16)
    slopes = torch.rand(heads) * -0.1
    sequences: list[tuple[ScoreStep, ...]] = [
        (Multiply(-2.0), Softcap(0.7), Multiply(3.0), Distance(slopes, absolute=True)),
        (Distance(slopes[:1], absolute=False), Bias(pair, (heads * q_len * kv_len, q_len * kv_len, kv_len, 1), 0)),
        (Bias(torch.randn(63), (0, 0, -1, 1), 23, 0.5), Softcap(2.0), Bias(key, (0, 0, 0, 1), 0)),
    ]
    for steps in sequences:
        mod = lambda s, b, h, i, j, steps=steps: modified(s, i, j, h, b, steps)  # noqa: E731
        request = AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.25, ScoreProgram(steps=steps))
        check(request, d_out, dense, score_mod=mod, floor=2e-6)


@pytest.fixture
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of flex_attention run here, and their score mods by their graphs."""
    monkeypatch.setattr(TritonBackend, "missing", lambda self, device: None)
    monkeypatch.setattr(op_specs, "build_steps", lambda *args: None)
    route.route.cache_clear()
    with magi_flex.enable(backend="triton"):
        yield
    route.route.cache_clear()


def check_score_mod(score_mod: ScoreMod, reference_mod: ScoreMod, captures=(), exact=(), heads=2) -> None:
    q_len, kv_len = 20, 30
    mask_case = make_mask("causal", q_len, kv_len)
    block_mask = magi_flex.create_block_mask(mask_case.mask_mod, None, None, q_len, kv_len, device="cpu")
    qkv_ = qkv(1, heads, 1, q_len, kv_len)
    check_training(attend, qkv_, mask_case.dense(), block_mask, score_mod, reference_mod, captures, exact, floor=3e-6)


# Those that need code of another kind than the others.
GENERAL = (
    "alibi", "constant", "hard_causal", "learned_temperature", "log_gates", "pair_bias", "positions_only",
    "query_dependent_bias", "separable_2d_bias", "t5", "temperature_per_head",
)  # fmt: skip


@pytest.mark.parametrize("name", GENERAL)
def test_general_score_mods(name: str, as_graphs: None) -> None:
    """With the gradients of what they capture."""
    case = make_score_mod(name, 1, 2, 20, 30)
    exact = case.captures_as(torch.float64)
    learned = [case.captures[n] for n in case.learned]
    check_score_mod(case.score_mod, case.bind(exact), learned, [exact[n] for n in case.learned])


FUNCTIONS: dict[str, ScoreMod] = {
    "integers": lambda s, b, h, q, k: s + 0.1 * ((q - k) // 3) - 0.2 * ((k - q) % 5) + 0.1 * (-(q + 1) % 4),
    "rounding": lambda s, b, h, q, k: (
        s
        + 0.1 * torch.div(k - q, 4, rounding_mode="trunc")
        + ((k - 9) / 3).floor() * 0.1
        + ((q - 7) / 2).round() * 0.1
        + torch.round(0.123 * (q - k), decimals=1)
        + torch.round(1.7 * k, decimals=-1) * 0.1
        + 0.1 * torch.remainder(0.7 * (k - q), 2.5)
    ),
    "bits": lambda s, b, h, q, k: torch.where(((q ^ k) & 3 == 0) | ~(k > 7), s, s * 0.5 + ((q << 2) >> 1) * 0.01),
    "powers": lambda s, b, h, q, k: s * s * 0.1 + s**3 * 0.01 + 0.9 ** (q - k).abs() + (1.0 + k) ** -0.5,
    "exponentials": lambda s, b, h, q, k: (
        torch.exp(s * 0.3) - torch.expm1(s * 0.01) + torch.log1p(s.abs()) + torch.exp2(0.1 * s)
    ),
    "logarithms": lambda s, b, h, q, k: s + torch.log(q + 1.0) - 0.5 * torch.log2(k + 1.0) + torch.log10(k + q + 1.0),
    "sigmoids": lambda s, b, h, q, k: torch.sigmoid(s) + torch.nn.functional.silu(s) + torch.tanh(0.1 * s) + s,
    "waves": lambda s, b, h, q, k: s * torch.cos(0.1 * (q - k)) + torch.sin(0.2 * s) + torch.erf(s),
    "bounds": lambda s, b, h, q, k: (
        s.clamp(-1.5, 1.0) + torch.maximum(s, -s) * 0.5 + torch.minimum(s, torch.zeros_like(s)) + torch.relu(s)
    ),
    "logic": lambda s, b, h, q, k: torch.where(
        torch.logical_and(q > k, k != 3).logical_not() | (h == 1), s.masked_fill(k == q, 0.25), s - 1
    ),
    "low_precision": lambda s, b, h, q, k: (  # a number that is compared with a bfloat16 is rounded first
        s + (((q % 4) * 0.1).to(torch.bfloat16) == 0.1) * 0.5 + (0.7 < (k * 0.1).to(torch.bfloat16)) * 0.25
    ),
    "casts": lambda s, b, h, q, k: s + (s.to(torch.int32).to(torch.float32) + (q > k).float() + s.sign()) * 0.1,
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_operators_have_torch_s_meaning(name: str, as_graphs: None) -> None:
    check_score_mod(FUNCTIONS[name], FUNCTIONS[name], heads=1)


def test_captures_of_every_kind(as_graphs: None) -> None:
    """Scalars, ints, bools, 16-bit tables, negative indices, strides, and what is computed from captures alone."""
    flags = torch.rand(40) < 0.5
    low = torch.randn(40).to(torch.bfloat16)
    spread = torch.randn(2, 24, 80)[..., ::2]
    shared = torch.randn(1, 40).expand(24, 40)
    number, power = torch.tensor(0.7), 3

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = torch.where(flags[k], s * number, s + power)
        return s + low[k].to(s.dtype) + spread[h, q, k] * shared[q, k] + low.float().exp()[k - q] + spread[1, 3, k]

    check_score_mod(score_mod, score_mod)


def test_what_cannot_be_generated_is_an_objection(as_graphs: None) -> None:
    edges = torch.tensor([-1.0, 0.0, 1.0])
    q, k, v = qkv(1, 2, 1, 8)
    with pytest.raises(ValueError, match="cannot generate code for aten::bucketize"):
        attend(q, k, v, lambda s, b, h, i, j: s + torch.bucketize(s, edges))


def test_score_mods_see_the_positions_of_sharded_rows_and_keys() -> None:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + 0.01 * (q - k) * (h + 1) + b

    q, k, v, _ = inputs(2, 3, 3, 40, 40, 16, 16)
    rows, keys = torch.randperm(40)[:25], torch.randperm(40)
    index_map = IndexMap(1, 1, rows, keys)
    zero = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
    program = score_program(make_fx(score_mod, tracing_mode="fake")(*zero))
    steps = (Distance(torch.tensor([0.01, 0.02, 0.03]), absolute=False),)
    part = torch.ones(1, 1, 25, 40, dtype=torch.bool)
    local = (q[1:, 1:, rows], k[1:, 1:, keys], v[1:, 1:, keys])
    general = AttentionRequest(
        *local, MaskPlan.from_dense(part), 0.25, ScoreProgram(None, program, index_map=index_map)
    )
    simple = AttentionRequest(*local, MaskPlan.from_dense(part), 0.25, ScoreProgram(steps, index_map=index_map))
    whole = dense_attention(q, k, v, None, score_mod, 0.25)
    result = KERNEL.forward(general)
    torch.testing.assert_close(result.out.double(), whole.out[1:, 1:, rows], atol=1e-5, rtol=1e-5)
    by_steps = dense_attention(q, k, v, None, lambda s, b, h, i, j: s - 0.01 * (i - j) * (h + 1), 0.25)
    torch.testing.assert_close(KERNEL.forward(simple).out.double(), by_steps.out[1:, 1:, rows], atol=1e-5, rtol=1e-5)
