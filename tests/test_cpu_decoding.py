"""The C++ kernels with few queries: lanes along the head dim, keys cut into parts."""

from __future__ import annotations

import math

import pytest
import torch

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import make_mask
from tests.test_cpu_kernel import BACKEND, SCORE_CASES, check, poisoned_memory, random_inputs

__all__ = ["poisoned_memory"]  # a fixture
pytestmark = pytest.mark.skipif(
    BACKEND.missing(torch.device("cpu")) is not None, reason=str(BACKEND.missing(torch.device("cpu")))
)


def random_plan(q_len: int, kv_len: int, slots: int = 2) -> MaskPlan:
    """Rows of ``slots`` intervals anywhere; the first row attends to nothing."""
    generator = torch.Generator().manual_seed(kv_len)
    bounds = torch.randint(0, kv_len + 1, (1, 1, 2 * slots, q_len), generator=generator).sort(2).values.int()
    starts, ends = bounds[:, :, ::2], bounds[:, :, 1::2].clone()
    ends[..., 0] = 0
    return MaskPlan(RowIntervals.build(starts, ends, kv_len))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
def test_few_queries(q_len: int, dtype: torch.dtype) -> None:
    for dim, v_dim in ((64, 64), (33, 20), (5, 3), (16, 130)):
        q, k, v = random_inputs(2, 4, 2, q_len, 300, dim, v_dim, dtype)
        mask = make_mask("document_causal", q_len, 300).dense() if q_len > 1 else torch.ones(1, 1, 1, 300).bool()
        check(q, k, v, mask)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 4097), (2, 9000), (1, 131072 + 5), (150, 8193)])
def test_keys_in_parts(q_len: int, kv_len: int) -> None:
    q, k, v = random_inputs(1, 2, 1, q_len, kv_len, 16, 8, torch.float32)
    plan = random_plan(q_len, kv_len) if q_len > 1 else MaskPlan(RowIntervals.full(1, kv_len, "cpu"))
    check(q, k, v, plan.to_dense(), plan)


@pytest.mark.parametrize("score", ["softcap", "all_in_turn"])
def test_score_steps(score: str) -> None:
    steps, score_mod = SCORE_CASES[score]
    q, k, v = random_inputs(2, 4, 2, 3, 170, 16, 24, torch.float32)
    check(q, k, v, torch.ones(1, 1, 3, 170).bool(), score_mod=score_mod, steps=steps)


def test_negative_and_no_scale() -> None:
    q, k, v = random_inputs(1, 2, 2, 1, 50, 16, 16, torch.float32)
    plan = MaskPlan(RowIntervals.full(1, 50, "cpu"))
    for scale in (-0.25, 0.0):
        out = BACKEND.forward(AttentionRequest(q, k, v, plan, scale)).out
        torch.testing.assert_close(out, (scale * q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_in_one_part(bad: float) -> None:
    q, k, v = random_inputs(1, 1, 1, 2, 9000, 16, 16, torch.float32)
    k[0, 0, 5000] = bad
    ends = torch.tensor([9000, 4500], dtype=torch.int32).view(1, 1, 1, 2)
    plan = MaskPlan(RowIntervals(torch.zeros_like(ends), ends, 9000))
    result = BACKEND.forward(AttentionRequest(q, k, v, plan, 0.25))
    assert result.out[0, 0, 0].isnan().all() and result.lse[0, 0, 0].isnan()
    assert result.out[0, 0, 1].isfinite().all() and result.lse[0, 0, 1].isfinite()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v = random_inputs(1, 1, 1, 1, 20000, 64, 64, torch.float32)
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals.full(1, 20000, "cpu")), 0.125)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(BACKEND.forward(request))
    torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result.out, results[0].out) and torch.equal(result.lse, results[0].lse)
