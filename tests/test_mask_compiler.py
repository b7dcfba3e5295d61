"""The mask compiler: every pattern becomes exactly its dense mask, by the rule it should.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions.
"""

from __future__ import annotations

import pytest
import torch

from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.to_intervals import PlanReport, plan_with_report
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, MaskCase, make_mask

LENGTHS = [(1, 1), (5, 5), (127, 127), (129, 129), (257, 257), (5, 129), (257, 127), (1025, 300)]
LONG = [(1025, 1025), (2046, 2046)]
# Rows of many intervals and no bound on them, or no structure to find.
STREAMED = {
    "dense_table",
    "dilated",
    "all_images_mutual",
    "paged",
    "longformer",
    "bigbird",
    "selected_blocks",
    "temporal_head",
}


def compile_case(case: MaskCase) -> tuple[MaskPlan, PlanReport]:
    program, captures = trace_mask_mod(case.mask_mod)
    return plan_with_report(program, captures, case.batch, case.heads, case.q_len, case.kv_len)


def check_exact(plan: MaskPlan, case: MaskCase) -> None:
    dense = case.dense()
    assert torch.equal(plan.to_dense().expand(dense.shape), dense)


@pytest.mark.parametrize("name", MASKS)
def test_every_pattern_is_exact(name: str) -> None:
    for q_len, kv_len in LENGTHS + LONG:
        case = make_mask(name, q_len, kv_len, seed=q_len)
        plan, report = compile_case(case)
        check_exact(plan, case)
        if case.max_intervals is not None and plan.bit_tiles is None:
            assert plan.intervals.max_intervals <= case.max_intervals
    assert report.path == ("stream" if name in STREAMED else "symbolic"), report.reasons
