"""The Hopper kernels' own source on a CPU (tests/emulation) against dense float64 attention, at small sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import ffa, ffa_backward_schedule, ffa_plans, tile_plans
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_copy_rows import can_copy, launch_copy_rows
from magi_flex.kernels.request import (
    IDENTITY,
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Multiply,
    ScoreProgram,
    Softcap,
)
from magi_flex.kernels.route import route
from magi_flex.mask_plan import MaskPlan
from magi_flex.ops import run_backward, run_forward
from magi_flex.tiles import TilePlan
from tests.cases.reference import AttentionWithGradients, assert_within_factor, dense_attention_with_gradients
from tests.cases.score_mods import ScoreMod
from tests.cases.score_programs import traced_score
from tests.cases.score_steps import step_programs, steps_mod
from tests.emulation import emulator

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BATCH, HEADS, KV_HEADS = 1, 4, 2


def causal(q_len: int, kv_len: int) -> MaskPlan:
    ends = torch.arange(q_len, dtype=torch.int32).view(1, 1, 1, -1) + kv_len - q_len + 1
    return MaskPlan(RowIntervals.build(torch.zeros_like(ends), ends, kv_len))


def scattered(q_len: int, kv_len: int) -> MaskPlan:
    """Three intervals a row at random, some rows empty, some whole."""
    torch.manual_seed(q_len)
    starts, ends = torch.randint(0, kv_len + 1, (2, 1, 1, 3, q_len), dtype=torch.int32).sort(0).values
    empty, whole = torch.rand(2, q_len) < 0.2
    starts[..., whole & ~empty], ends[..., whole & ~empty] = 0, kv_len
    ends[..., empty] = 0
    return MaskPlan(RowIntervals.build(starts, ends, kv_len))


def inputs(q_len: int, kv_len: int, head_dim: int, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(head_dim + q_len)
    q = torch.randn(BATCH, HEADS, q_len, head_dim).to(dtype)
    k = torch.randn(BATCH, KV_HEADS, kv_len, head_dim).to(dtype)
    v = torch.randn(BATCH, KV_HEADS, kv_len, v_dim).to(dtype)
    return q, k, v, torch.randn(BATCH, HEADS, q_len, v_dim).to(dtype)


def dense(request: AttentionRequest, d_out: Tensor, d_lse: Tensor | None, dtype: torch.dtype) -> AttentionWithGradients:
    mod = steps_mod(request.score.steps or ())
    return dense_attention_with_gradients(
        request.q, request.k, request.v, d_out, d_lse, request.plan.to_dense(), mod, (), request.scale, dtype
    )


def check_backward(request: AttentionRequest, d_out: Tensor, d_lse: Tensor | None = None) -> AttentionGradients:
    exact, rounded = (dense(request, d_out, d_lse, dtype) for dtype in (torch.float64, request.q.dtype))
    result = FfaBackend().backward(request, exact.out.to(request.q.dtype), exact.lse.float(), d_out, d_lse)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(result, name), getattr(rounded, name), getattr(exact, name), floor=2e-3)
    assert (result.dq[exact.lse == -torch.inf] == 0).all()
    return result


def test_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffa, "_GAIN_OF_THREE", 99.0)  # three warpgroups, however few the rows
    for seed, (plan, (q_len, kv_len)) in enumerate(((causal, (127, 257)), (scattered, (129, 150)))):
        emulator.install(monkeypatch, seed)
        q, k, v, d_out = inputs(q_len, kv_len, 128, 128, torch.bfloat16)
        request = AttentionRequest(q, k, v, plan(q_len, kv_len), 0.1)
        result = FfaBackend().forward(request)
        exact, rounded = (dense(request, d_out, None, dtype) for dtype in (torch.float64, q.dtype))
        assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
        assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
        assert_within_factor(result.max_score, rounded.max_score, exact.max_score, floor=1e-5)


def always_sum_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows have few keys."""
    monkeypatch.setattr(ffa, "_FEW_KEYS", dict.fromkeys(ffa._FEW_KEYS, 0))


def test_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    always_sum_dq(monkeypatch)
    for seed, (plan, (q_len, kv_len), dim) in enumerate(((causal, (127, 257), 64), (scattered, (150, 131), 128))):
        emulator.install(monkeypatch, seed)
        q, k, v, d_out = inputs(q_len, kv_len, dim, dim, torch.bfloat16)
        d_lse = torch.randn(BATCH, HEADS, q_len)
        check_backward(AttentionRequest(q, k, v, plan(q_len, kv_len), 0.1), d_out, d_lse)


def test_prepared_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operators' functions: other contents of the same layout, and what a prepared call does not serve."""
    always_sum_dq(monkeypatch)
    emulator.install(monkeypatch)
    monkeypatch.setattr(ffa, "_GAIN_OF_THREE", 99.0)
    monkeypatch.setattr(FfaBackend, "missing", lambda self, device: None)
    route.cache_clear()
    plan, order = causal(9, 33), (3, 2, 1, 0)
    *qkv, d_out = inputs(9, 33, 128, 128, torch.bfloat16)
    wider = torch.stack([d_out, d_out], 4)[..., 0]
    for given, d_lse in ((d_out, None), (d_out / 2, None), (wider, None), (d_out, torch.randn(BATCH, HEADS, 9))):
        request = AttentionRequest(*qkv, plan, 0.1)
        out, lse, _ = run_forward(*qkv, plan, IDENTITY, 0.1, "ffa", True, order, False)
        *grads, captured = run_backward(*qkv, out, lse, given, d_lse, plan, IDENTITY, 0.1, "ffa", *[order] * 3)
        exact, rounded = (dense(request, given, d_lse, dtype) for dtype in (torch.float64, torch.bfloat16))
        for name, got in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
            assert_within_factor(got, getattr(rounded, name), getattr(exact, name), floor=2e-3)
        assert captured == []
        qkv = [x * 2 for x in qkv[:2]] + [qkv[2] / 2]
    route.cache_clear()


def test_gradient_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    always_sum_dq(monkeypatch)
    emulator.install(monkeypatch)
    q, k, v, d_out = inputs(5, 9, 64, 64, torch.bfloat16)
    request = AttentionRequest(q, k, v, causal(5, 9), 0.1)
    exact = dense(request, d_out, None, torch.float64)
    for dtype in (torch.float16, torch.float64):
        dq = torch.full(q.shape, torch.nan, dtype=dtype)
        FfaBackend().backward_into(request, exact.out.to(q.dtype), exact.lse.float(), d_out, None, dq)
        torch.testing.assert_close(dq.double(), exact.dq, rtol=2e-2, atol=2e-2)


def test_fixed_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = inputs(150, 197, 64, 64, torch.float16)
    request = AttentionRequest(q, k, v, scattered(150, 197), 0.1, deterministic=True)
    results = []
    for seed in range(3):
        emulator.install(monkeypatch, seed)
        results.append(check_backward(request, d_out))
    for other in results[1:]:
        assert all(torch.equal(getattr(results[0], n), getattr(other, n)) for n in ("dq", "dk", "dv"))
    # Eight heads of one key/value head, that share steps.
    emulator.install(monkeypatch)
    q, k, v, d_out = inputs(127, 257, 64, 64, torch.float16)
    k, v = k[:, :1], v[:, :1]
    q, d_out = (x.repeat_interleave(2, 1) * torch.linspace(0.5, 1.5, 8).view(8, 1, 1) for x in (q, d_out))
    q, d_out = q.to(k.dtype), d_out.to(k.dtype)
    check_backward(AttentionRequest(q, k, v, causal(127, 257), 0.1, deterministic=True), d_out)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_wide_heads(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    always_sum_dq(monkeypatch)
    for seed, (plan, (q_len, kv_len)) in enumerate(((causal, (65, 129)), (scattered, (70, 131)))):
        emulator.install(monkeypatch, seed)
        q, k, v, d_out = inputs(q_len, kv_len, *dims, torch.bfloat16)
        check_backward(AttentionRequest(q, k, v, plan(q_len, kv_len), 0.07), d_out)


@pytest.mark.parametrize(("name", "deterministic"), [("factors", False), ("four_steps", True)])
def test_score_steps(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q_len, kv_len = 127, 150
    torch.manual_seed(0)
    score = ScoreProgram(steps=step_programs(BATCH, HEADS, q_len, kv_len)[name])
    for seed, plan in enumerate((causal, scattered)):
        emulator.install(monkeypatch, seed)
        q, k, v, d_out = inputs(q_len, kv_len, 64, 64, torch.bfloat16)
        request = AttentionRequest(q, k, v, plan(q_len, kv_len), 0.2, score, deterministic)
        check_backward(request, d_out)
        check_other_numbers(request, d_out)


def check_other_numbers(request: AttentionRequest, d_out: Tensor) -> None:
    """What was launched is kept for other tensors of the same layout, and for other numbers in the same steps."""
    first, *rest = request.score.steps or ()
    others = [replace(step, factor=1.5) if isinstance(step, Multiply) else step for step in rest]
    others = [replace(step, cap=7.0) if isinstance(step, Softcap) else step for step in others]
    kept, q, k, v = len(request.plan.memo), request.q * 1.5, request.k / 2, request.v * 2
    score = replace(request.score, steps=(first, *others))
    check_backward(replace(request, q=q, k=k, v=v, score=score), d_out / 2)
    assert (first, *others) != request.score.steps and len(request.plan.memo) == kept


def test_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results over some keys, merged inside the kernel into those over others; rows without keys on either side."""
    emulator.install(monkeypatch)
    q_len, kv_len = 129, 150
    q, k, v, d_out = inputs(q_len, kv_len, 64, 64, torch.bfloat16)
    whole = scattered(q_len, kv_len)
    request = AttentionRequest(q, k, v, whole, 0.1, wide_results=True)
    exact, rounded = (dense(request, d_out, None, dtype) for dtype in (torch.float64, q.dtype))
    mask = whole.to_dense()
    left = torch.arange(kv_len) < 70
    lse = torch.full((BATCH, HEADS, q_len), -torch.inf)
    total = AttentionOutput(torch.zeros(BATCH, HEADS, q_len, 64), lse, lse.clone())
    for part in (mask & left, torch.zeros_like(mask), mask & ~left):
        plan = MaskPlan(RowIntervals.from_dense(part))
        total = FfaBackend().accumulate(replace(request, plan=plan), total)
    assert total.lse is lse
    assert_within_factor(total.out, rounded.out, exact.out, floor=1e-5)
    assert_within_factor(total.lse, rounded.lse, exact.lse, floor=1e-5)
    assert_within_factor(total.max_score, rounded.max_score, exact.max_score, floor=1e-5)


def test_parts_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch entries with masks of their own, rows that lack keys in some parts or in all."""
    monkeypatch.setattr(ffa, "key_parts", lambda *sizes: 3)
    emulator.install(monkeypatch)
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, 5, 64).to(torch.float16)
    k, v = torch.randn(2, 2, KV_HEADS, 197, 64).to(torch.float16)
    starts, ends = torch.randint(0, 198, (2, 2, 1, 2, 5), dtype=torch.int32).sort(0).values
    starts[0, ..., :2], ends[0, ..., :2] = 0, 197
    ends[1, ..., 3] = 0
    plan = MaskPlan(RowIntervals.build(starts, ends, 197))
    request = AttentionRequest(q, k, v, plan, -0.1)
    result = FfaBackend().forward(request)
    exact, rounded = (dense(request, torch.zeros_like(q), None, dtype) for dtype in (torch.float64, q.dtype))
    assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
    assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
    assert_within_factor(result.max_score, rounded.max_score, exact.max_score, floor=1e-5)


def random_bits(q_len: int, kv_len: int) -> MaskPlan:
    """Rows of random bits, with tiles that are empty or full among them, then causal rows and empty ones."""
    torch.manual_seed(q_len)
    mask = torch.rand(1, 1, q_len, kv_len) < 0.5
    mask[..., :128, 128:256] = q_len % 2 == 0
    mask[..., 128:, :] = torch.arange(kv_len) <= torch.arange(q_len - 128)[:, None]
    mask[..., 3:7, :] = mask[..., -1, :] = False
    plan = MaskPlan.from_dense(mask)
    assert plan.bit_tiles is not None and plan.area() > plan.intervals.area() > 0
    return plan


def test_general_score_mod_and_bit_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q_len, kv_len = 136, 170
    torch.manual_seed(0)
    captures = (torch.randn(HEADS, 5), torch.tensor(0.7))

    def bind(table: Tensor, factor: Tensor) -> ScoreMod:
        return lambda s, b, h, q, k: torch.tanh(s) * factor + table[h, (q - k) % 5].to(s.dtype)

    emulator.install(monkeypatch)
    q, k, v, d_out = inputs(q_len, kv_len, 64, 64, torch.bfloat16)
    score = traced_score(bind, captures)
    request = AttentionRequest(q, k, v, random_bits(q_len, kv_len), 0.2, score, deterministic=True)
    mask, mod = request.plan.to_dense(), bind(captures[0].double(), captures[1].double())
    exact, rounded = (
        dense_attention_with_gradients(q, k, v, d_out, None, mask, mod, (), request.scale, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    result = FfaBackend().forward(request)
    assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
    assert_within_factor(result.lse, rounded.lse, exact.lse, floor=1e-5)
    gradients = FfaBackend().backward(request, exact.out.to(q.dtype), exact.lse.float(), d_out, None)
    for name in ("dq", "dk", "dv"):
        assert_within_factor(getattr(gradients, name), getattr(rounded, name), getattr(exact, name), floor=2e-3)


def documents(q_len: int, kv_len: int) -> MaskPlan:
    """Causal documents of 1 to 70 tokens, others in each batch entry; rows behind the keys attend to nothing."""
    torch.manual_seed(kv_len)
    lengths = torch.randint(1, 71, (2, kv_len)).cumsum(1)
    row, key = (
        torch.searchsorted(lengths, torch.arange(n).expand(2, n).contiguous(), right=True) for n in (q_len, kv_len)
    )
    causal_pairs = torch.arange(kv_len) <= torch.arange(q_len)[:, None]
    dense = (row[:, None, :, None] == key[:, None, None, :]) & causal_pairs
    dense[0, ..., -3:, :] = False
    return MaskPlan(RowIntervals.from_dense(dense))


def all_kinds(scale: Tensor, table: Tensor, gates: Tensor, bias: Tensor, keys: Tensor, axis: Tensor) -> ScoreMod:
    """Gradients that are summed over all pairs of a head, along diagonals, rows and columns, and pair by pair."""
    return mods.chain(
        mods.temperature(scale), mods.t5_bias(table, 40), mods.log_gates(gates), mods.pair_bias(bias),
        mods.key_bias(keys), lambda s, b, h, q, k: s + axis[q % 7 - k % 7 + 6], mods.softcap(6.0),
    )  # fmt: skip


def test_gradients_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    always_sum_dq(monkeypatch)
    for seed, (plan, (q_len, kv_len)) in enumerate(((documents, (127, 257)), (causal, (1, 5)))):
        emulator.install(monkeypatch, seed)
        q, k, v, d_out = (x.repeat(2, 1, 1, 1) for x in inputs(q_len, kv_len, 64, 64, torch.bfloat16))
        d_lse = torch.randn(q.shape[:3])
        shapes = ((HEADS,), (HEADS, 16), (max(q_len, kv_len),), (1, HEADS, q_len, kv_len), (2, HEADS, kv_len), (13,))
        captures = [torch.rand(shape).add(0.2).requires_grad_() for shape in shapes]
        request = AttentionRequest(q, k, v, plan(q_len, kv_len), 0.1, traced_score(all_kinds, captures, learned=True))
        mask, references = request.plan.to_dense(), []
        for dtype in (torch.float64, q.dtype):
            leaves = [x.detach().to(torch.promote_types(dtype, x.dtype)).requires_grad_() for x in captures]
            mod = all_kinds(*leaves)
            references.append(
                dense_attention_with_gradients(q, k, v, d_out, d_lse, mask, mod, leaves, request.scale, dtype)
            )
        exact, rounded = references
        result = FfaBackend().backward(request, exact.out.to(q.dtype), exact.lse.float(), d_out, d_lse)
        for name in ("dq", "dk", "dv"):
            assert_within_factor(getattr(result, name), getattr(rounded, name), getattr(exact, name), floor=2e-3)
        for found, near, right in zip(result.captures, rounded.captures, exact.captures, strict=True):
            assert found is not None
            assert_within_factor(found, near, right, floor=1e-3)
        assert (
            result.captures[3] is not None and (result.captures[3][~mask.any(0).expand(HEADS, -1, -1)[None]] == 0).all()
        )


def test_room_for_more_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with unused capacity, as they are built on the device: only what is counted is visited."""
    q_len, kv_len = 40, 131
    build = tile_plans.kernel_tile_plan

    def with_room(*args: Any, **options: Any) -> TilePlan:
        tiles = build(*args, **options)
        room = 2 * len(tiles.tile_begin)

        def pad(x: Tensor, value: int) -> Tensor:
            return torch.nn.functional.pad(x, (0, room), value=value)

        # Whoever looks at unused tiles finds all rows in them.
        length = int(tiles.tile_end.max())
        ptr = {name: pad(getattr(tiles, name), int(getattr(tiles, name)[-1])) for name in ("full_ptr", "partial_ptr")}
        return replace(tiles, tile_begin=pad(tiles.tile_begin, 0), tile_end=pad(tiles.tile_end, length), **ptr)

    for module in (ffa_plans, ffa_backward_schedule):
        monkeypatch.setattr(module, "kernel_tile_plan", with_room)
    for module in (ffa, ffa_plans):
        monkeypatch.setattr(module, "has_room", lambda plan: True)
    monkeypatch.setattr(ffa_plans, "device_schedule", ffa_plans.make_schedule)
    monkeypatch.setattr(ffa_backward_schedule, "objection", lambda *facts: None)
    emulator.install(monkeypatch)
    q, k, v, d_out = (x.repeat(2, 1, 1, 1) for x in inputs(q_len, kv_len, 64, 64, torch.bfloat16))
    masks = [plan(q_len, kv_len).to_dense() for plan in (causal, scattered)]
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals.from_dense(torch.cat(masks))), 0.1)
    result = FfaBackend().forward(request)
    exact, rounded = (dense(request, d_out, None, dtype) for dtype in (torch.float64, q.dtype))
    assert_within_factor(result.out, rounded.out, exact.out, floor=1e-3)
    # The host does not look at such a plan: a flag on the device says which kernels make dq, and all are launched.
    for most_keys in (0, kv_len):
        monkeypatch.setattr(ffa, "_FEW_KEYS", {(64, 64): most_keys})
        request = replace(request, plan=MaskPlan(RowIntervals.from_dense(torch.cat(masks))))
        assert ffa.has_few_keys(request.plan, most_keys).tolist() == [most_keys > 0]
        check_backward(request, d_out)
        kept = len(request.plan.memo)
        check_backward(replace(request, q=q / 2, k=k * 2, v=v / 2), d_out * 2)
        assert len(request.plan.memo) == kept


@pytest.mark.parametrize("indices", ["none", "source", "target", "both"])
def test_copy_rows(indices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before rows into rows before heads and back, head dims and dtypes of their own, against indexing."""
    emulator.install(monkeypatch)
    torch.manual_seed(2)
    rows, among = 37, 61
    from_row, to_row = (torch.randperm(among)[:rows] for _ in range(2))
    source_index = from_row if indices in ("source", "both") else None
    target_index = to_row if indices in ("target", "both") else None
    sources, targets = [], []
    for dim, dtype in ((24, torch.bfloat16), (12, torch.float32), (136, torch.float16)):
        n, m = (rows if index is None else among for index in (source_index, target_index))
        source = torch.randn(2, 3, n, dim).to(dtype).movedim(2, 0)
        target = torch.zeros(2, 3, m, dim, dtype=dtype).movedim(2, 0)
        packed = dim != 12
        sources.append(source.contiguous() if packed else source)
        targets.append(target if packed else target.contiguous())
    assert can_copy(sources, targets)
    launch_copy_rows(sources, targets, source_index, target_index)
    for source, target in zip(sources, targets, strict=True):
        expected = torch.zeros_like(target)
        taken = source if source_index is None else source[source_index]
        expected[slice(None) if target_index is None else target_index] = taken
        assert torch.equal(target, expected)
