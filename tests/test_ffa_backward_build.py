"""The Hopper backward without a GPU: what the compiler made of it, and the order of its work."""

from __future__ import annotations

import pytest
import torch

from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import ffa_backward
from magi_flex.kernels.cuda_build import has_compiler
from magi_flex.kernels.ffa import FfaBackend, backward_instance, gradient_q_instance, has_few_keys
from magi_flex.kernels.ffa_backward import BackwardInstance
from magi_flex.kernels.ffa_backward_schedule import (
    band_steps,
    choose_heads,
    heads_unseen,
    make_backward_schedule,
    plan_backward,
    tile_steps,
)
from magi_flex.kernels.ffa_generated_score import generated_score
from magi_flex.kernels.request import Multiply, RequestFacts, Softcap
from magi_flex.kernels.route import explain_route
from magi_flex.kernels.score_distance import Lengths
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band
from magi_flex.tiles import build_tile_plan
from tests.cases.score_programs import traced_score
from tests.test_ffa_build import HGMMA, LOAD_LOCAL, R2P, STORE_LOCAL, instructions

ROWS, KEYS = 64, 128


@pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler")
@pytest.mark.parametrize(
    "instance",
    [
        BackwardInstance(torch.bfloat16, 128, 128),
        BackwardInstance(torch.bfloat16, 128, 128, 80),
        BackwardInstance(torch.bfloat16, 192, 128, 48),
        BackwardInstance(torch.bfloat16, 256, 256, 64, 64, False),
        BackwardInstance(torch.float16, 128, 128, wide=True, wide_out=True),
        BackwardInstance(torch.float16, 64, 64, 128),
    ],
    ids=str,
)
def test_backward_uses_the_matrix_units_and_spills_nothing(instance: BackwardInstance) -> None:
    cubin = instance.compile()
    assert cubin.spill_bytes == 0
    assert cubin.warnings == []
    found = instructions(cubin.code, "ffa_backward")
    scores, rows = instance.head_dim // 16, instance.rows // 16
    # dQ of one panel of 64 columns, or of a panel and half of another; the kernel of wide heads has a first S instead,
    # before its loop.
    dq = -(-instance.head_dim // 128) * KEYS // 16 if instance.sum_dq else scores
    assert found[HGMMA] == scores + instance.v_dim // 16 + rows + dq + rows
    assert found[STORE_LOCAL] == found[LOAD_LOCAL] == 0


@pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler")
def test_sums_of_captures_leave_the_products_alone() -> None:
    captures = [torch.rand(shape).requires_grad_() for shape in ((8, 32), (8,))]
    program = traced_score(lambda t, x: mods.chain(mods.t5_bias(t), mods.alibi(x)), captures, learned=True)
    score = generated_score(program, torch.device("cpu"), True, Lengths(8, 512, 512), 1)
    instance = backward_instance(torch.bfloat16, 128, 128, generated=score.generated)
    cubin = instance.compile()
    assert cubin.warnings == [] and cubin.spill_bytes <= 32
    found = instructions(cubin.code, "ffa_backward")
    assert found[HGMMA] == 2 * 128 // 16 + 2 * instance.rows // 16 + KEYS // 16


def test_parameters_have_the_sizes_that_the_source_asserts() -> None:
    assert [block.size for block in (ffa_backward._PREPARE_PARAMS, ffa_backward._FINISH_PARAMS)] == [136, 192]


def random_plan(mask_batch: int, mask_heads: int) -> MaskPlan:
    torch.manual_seed(0)
    shape = (mask_batch, mask_heads, 2, 300)
    starts, ends = (torch.randint(0, 700, shape, dtype=torch.int32) for _ in range(2))
    return MaskPlan(RowIntervals.build(starts, ends, 700))


@pytest.mark.parametrize(("mask_batch", "mask_heads", "heads"), [(1, 1, 4), (3, 1, 2), (2, 4, 2), (2, 4, 1)])
def test_schedule_has_every_key_tile_once_longest_first(mask_batch: int, mask_heads: int, heads: int) -> None:
    ragged = mask_heads == 1
    plan = build_tile_plan(
        random_plan(mask_batch, mask_heads),
        ROWS,
        KEYS,
        transposed=True,
        ragged=ragged,
        run_align=8 if ragged else 1,
    )
    steps = tile_steps(plan).tolist()
    head_ptr = plan.head_ptr.tolist()
    entries = make_backward_schedule(plan, mask_heads, heads).entries
    assert (entries[:, 2].diff() <= 0).all()
    walked = heads if mask_heads > 1 else 1  # masks of an item
    seen = []
    for mask, tile, total, _ in entries.tolist():
        indices = [head_ptr[mask + h] + tile for h in range(walked)]
        assert total == sum(steps[i] for i in indices) * (1 if mask_heads > 1 else heads)
        seen += indices
    assert sorted(seen) == list(range(len(steps)))


def test_steps_of_aligned_runs_are_no_more() -> None:
    """Documents at odd places: steps that begin at row groups cost next to nothing."""
    lengths = torch.tensor([301, 517, 1003, 205, 22])
    end = lengths.cumsum(0).repeat_interleave(lengths)
    row = torch.arange(len(end))
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    plan = MaskPlan(RowIntervals.build(starts.view(1, 1, 1, -1), row.view(1, 1, 1, -1) + 1, len(row)))
    free, aligned = (build_tile_plan(plan, ROWS, KEYS, transposed=True, ragged=True, run_align=n) for n in (1, 8))
    least = int(sum(x.sum() for x in free.steps()))
    assert int(tile_steps(aligned).sum()) <= 1.05 * least
    assert int(tile_steps(free).sum()) > int(tile_steps(aligned).sum())


def test_heads_of_an_item() -> None:
    causal_2k, causal_32k = torch.arange(32, 0, -2), torch.arange(512, 0, -2)
    # 128 items of all heads would leave most processors idle.
    assert choose_heads(causal_2k, 64, 8, 132, head_bytes=2048 * 1024) == 4
    assert choose_heads(causal_32k, 64, 8, 132) == 1  # drift
    causal_8k = torch.arange(64, 0, -1)
    assert choose_heads(causal_8k, 64, 8, 132) < 8 and choose_heads(causal_8k, 64, 8, 132, head_bytes=4 << 20) == 8
    assert choose_heads(torch.full((64,), 128), 64, 8, 132) == 8  # even work
    assert choose_heads(torch.tensor([16, 18, *[18] * 60, 10, 2]), 64, 8, 132) == 8  # a window
    assert choose_heads(causal_2k, 64, 1, 132) == 1
    assert choose_heads(causal_2k[:0], 64, 8, 132) == 8
    assert 6 % choose_heads(causal_2k, 12, 6, 132) == 0
    assert [heads_unseen(tiles, 64, 8, 132) for tiles in (5, 17, 67, 261)] == [1, 2, 8, 4]


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (300, 0), (70, 90), (None, 17)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1024, 1024), (777, 1024), (1024, 777), (5, 300)])
def test_steps_of_a_band(left: int | None, right: int | None, q_len: int, kv_len: int) -> None:
    own = torch.arange(q_len) + kv_len - q_len
    starts = torch.zeros_like(own) if left is None else own - left
    ends = torch.full_like(own, kv_len) if right is None else own + right + 1
    rows = RowIntervals.build(*(x.clamp(0, kv_len).int().view(1, 1, 1, -1) for x in (starts, ends)), kv_len)
    tiles = build_tile_plan(MaskPlan(rows), 80, KEYS, transposed=True, run_align=8)
    found, exact = band_steps(Band(left, right), q_len, kv_len, 80, KEYS), tile_steps(tiles)
    assert (found - exact).abs().max() <= 2  # full and partial runs of a tile end with a shorter step each
    assert (found == 0).tolist() == (exact == 0).tolist()


def test_heads_with_masks_of_their_own_share_key_tiles() -> None:
    schedule = plan_backward(random_plan(1, 4), ROWS, KEYS, 2, 4, 2, 132)
    begin = schedule.plan.tile_begin.view(4, -1)
    assert (begin == begin[0]).all() and (begin[0] == torch.arange(0, 700, KEYS)).all()


def test_few_keys_are_counted() -> None:
    plan = random_plan(2, 1)
    mean = plan.area() / (2 * plan.q_len)
    assert has_few_keys(plan, int(mean) + 1) is True and has_few_keys(plan, int(mean)) is False
    window = MaskPlan(RowIntervals.full(600, 700), structure=Band(99, 0))  # what is known counts, nobody looks
    assert has_few_keys(window, 101) is True and has_few_keys(window, 100) is False


def test_the_plan_must_have_key_tiles() -> None:
    plan = build_tile_plan(random_plan(1, 1), ROWS, KEYS)
    with pytest.raises(ValueError, match="transposed"):
        make_backward_schedule(plan, 1, 1)


def test_auto_takes_what_has_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FfaBackend, "missing", lambda self, device: None)
    for dim, steps, deterministic in ((128, (Multiply,), False), (256, (), False), (64, (Softcap,), True)):
        facts = RequestFacts(
            torch.device("cuda"), torch.bfloat16, dim, dim, 8, 8, steps, False, True, False, deterministic
        )
        assert FfaBackend().reservations(facts) == []
        assert dict(explain_route(facts))["ffa"] == []


@pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler")
def test_gradient_of_q_uses_the_matrix_units_and_spills_nothing() -> None:
    instance = gradient_q_instance(backward_instance(torch.bfloat16, 256, 256, pack=8))
    cubin = instance.compile()
    assert (cubin.spill_bytes, cubin.warnings) == (0, [])
    found = instructions(cubin.code, "ffa_gradient_q")
    # In the loop S, dP and dQ.
    assert found[HGMMA] == 2 * 256 // 16 + instance.kv_tile // 16
    assert found[STORE_LOCAL] == found[LOAD_LOCAL] == 0
    assert found[R2P] > 0


def test_work_is_not_split_over_heads_where_the_order_counts() -> None:
    plan = random_plan(1, 1)
    assert plan_backward(plan, ROWS, KEYS, 1, 8, 1, 132).heads < 8
    assert plan_backward(plan, ROWS, KEYS, 1, 8, 1, 132, split=False).heads == 8
