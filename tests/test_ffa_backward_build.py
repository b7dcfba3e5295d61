"""The Hopper backward without a GPU: what the compiler made of it, and the order of its work."""

from __future__ import annotations

import pytest
import torch

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import ffa_backward
from magi_flex.kernels.cuda_build import has_compiler
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_backward import BackwardInstance
from magi_flex.kernels.ffa_backward_schedule import (
    KEY_TILE,
    choose_heads,
    make_backward_schedule,
    plan_backward,
    tile_steps,
)
from magi_flex.kernels.request import Multiply, RequestFacts, ScoreStep, Softcap
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import build_tile_plan
from tests.test_ffa_build import HGMMA, LOAD_LOCAL, STORE_LOCAL, instructions

ROWS = 64


@pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler")
@pytest.mark.parametrize(
    "instance",
    [
        BackwardInstance(torch.bfloat16, 128),
        BackwardInstance(torch.float16, 128, wide=True, wide_out=True),
        BackwardInstance(torch.float16, 64),
    ],
    ids=str,
)
def test_backward_uses_the_matrix_units_and_spills_nothing(instance: BackwardInstance) -> None:
    cubin = instance.compile()
    assert cubin.spill_bytes == 0
    assert cubin.warnings == []
    found = instructions(cubin.code, "ffa_backward")
    scores, rows, keys = instance.head_dim // 16, instance.rows // 16, KEY_TILE // 16
    # The first S; then in the loop dP, dV, dQ, dK and the next S.
    assert found[HGMMA] == scores + (scores + rows + keys + rows + scores)
    assert found[STORE_LOCAL] == found[LOAD_LOCAL] == 0


def test_parameters_have_the_sizes_that_the_source_asserts() -> None:
    blocks = (ffa_backward._BACKWARD_PARAMS, ffa_backward._PREPARE_PARAMS, ffa_backward._FINISH_PARAMS)
    assert [block.size for block in blocks] == [248, 128, 184]


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
        KEY_TILE,
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
    free, aligned = (build_tile_plan(plan, ROWS, KEY_TILE, transposed=True, ragged=True, run_align=n) for n in (1, 8))
    least = int(sum(x.sum() for x in free.steps()))
    assert int(tile_steps(aligned).sum()) <= 1.05 * least
    assert int(tile_steps(free).sum()) > int(tile_steps(aligned).sum())


def test_heads_of_an_item() -> None:
    causal_2k, causal_32k = torch.arange(32, 0, -2), torch.arange(512, 0, -2)
    assert choose_heads(causal_2k, 64, 8, 132) == 2  # 128 items of all heads would leave most processors idle
    assert choose_heads(causal_32k, 64, 8, 132) == 1  # drift
    assert choose_heads(torch.full((64,), 128), 64, 8, 132) == 8  # even work
    assert choose_heads(torch.tensor([16, 18, *[18] * 60, 10, 2]), 64, 8, 132) == 8  # a window
    assert choose_heads(causal_2k, 64, 1, 132) == 1
    assert choose_heads(causal_2k[:0], 64, 8, 132) == 8
    assert 6 % choose_heads(causal_2k, 12, 6, 132) == 0


def test_heads_with_masks_of_their_own_share_key_tiles() -> None:
    schedule = plan_backward(random_plan(1, 4), ROWS, 2, 4, 2, 132)
    begin = schedule.plan.tile_begin.view(4, -1)
    assert (begin == begin[0]).all() and (begin[0] == torch.arange(0, 700, KEY_TILE)).all()


def test_the_plan_must_have_key_tiles() -> None:
    plan = build_tile_plan(random_plan(1, 1), ROWS, KEY_TILE)
    with pytest.raises(ValueError, match="transposed"):
        make_backward_schedule(plan, 1, 1)


def test_what_the_backward_leaves_to_others() -> None:
    def objections(dim: int, steps: tuple[type[ScoreStep], ...] = (), deterministic: bool = False) -> list[str]:
        device = torch.device("cuda")
        facts = RequestFacts(device, torch.bfloat16, dim, dim, 8, 8, steps, False, True, False, deterministic)
        return FfaBackend().objections(facts)

    assert objections(128) == objections(128, (Multiply,)) == []
    assert objections(192) == ["its backward serves head dims up to 128, not 192 and 192"]
    assert objections(64, (Multiply, Softcap)) == ["the score steps Softcap are not in its backward"]
    assert objections(64, deterministic=True) == ["its backward sums the gradients of q in no fixed order"]
