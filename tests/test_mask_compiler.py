"""The mask compiler: every pattern becomes exactly its dense mask, by the rule it should.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_lowering.capture import MaskModError, trace_mask_mod
from inductor_lowering.mask_program import UnsupportedMask
from inductor_lowering.to_intervals import PlanReport, plan_from_mask_mod, plan_from_program, plan_with_report
from magi_flex.fx_program import FxProgram
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, MaskCase, MaskMod, dense_mask, make_mask
from tests.random_masks import mask_cases

LENGTHS = [(1, 1), (5, 5), (127, 127), (129, 129), (257, 257), (5, 129), (257, 127), (1025, 300)]
LONG = [(1025, 1025), (2046, 2046)]
# Rows of many intervals and no bound on them, or no structure to find: evaluated as bits.
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
    assert bool(report.reasons) == (name in STREAMED)


@given(mask_cases())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_masks_are_exact(case: MaskCase) -> None:
    plan, _ = compile_case(case)
    check_exact(plan, case)


@pytest.mark.parametrize(
    "name,rules",
    [
        ("causal", {"separable"}),
        ("document_causal", {"separable"}),
        ("query_and_key_padding", {"rows", "separable"}),
        ("block_causal_in_documents", {"separable", "piecewise"}),
        ("image_blocks_in_causal_text", {"rows", "labels", "separable"}),
        ("natten_2d", {"separable", "piecewise"}),
        ("tree", {"separable", "grid"}),
    ],
)
def test_rules_that_apply(name: str, rules: set[str]) -> None:
    assert set(compile_case(make_mask(name, 1025))[1].rules) == rules


def exact(mask_mod: MaskMod, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> MaskPlan:
    plan = plan_from_mask_mod(mask_mod, batch, heads, q_len, kv_len)
    dense = dense_mask(mask_mod, batch, heads, q_len, kv_len)
    assert torch.equal(plan.to_dense().expand(dense.shape), dense)
    return plan


# ---- what the mask depends on ---------------------------------------------------------------------------------------


def test_a_mask_that_ignores_heads_is_stored_once() -> None:
    plan = exact(lambda b, h, q, k: k <= q, 130, 130, batch=3, heads=8)
    assert plan.starts.shape == (1, 1, 1, 130)


def test_batch_parity_and_tables_indexed_by_head() -> None:
    window_H = torch.tensor([3, 50, 7])
    assert exact(lambda b, h, q, k: (b % 2 == 0) | (k <= q), 60, 70, batch=3, heads=3).starts.shape[:2] == (3, 1)
    assert exact(lambda b, h, q, k: q - k < window_H[h], 60, 70, batch=3, heads=3).starts.shape[:2] == (1, 3)
    assert exact(lambda b, h, q, k: (q - k < window_H[h]) & (k > b), 60, 70, 2, 3).starts.shape[:2] == (2, 3)


def test_labels_of_batch_entries_against_windows_of_heads() -> None:
    label_BS = torch.randint(0, 3, (2, 90), generator=torch.Generator().manual_seed(0))
    window_H = torch.tensor([3, 20, 70])
    exact(lambda b, h, q, k: (label_BS[b, k] == h) & ((q - k).abs() <= window_H[h]), 90, 90, batch=2, heads=3)
    exact(lambda b, h, q, k: (label_BS[b, k] <= window_H[h] % 3) & (k <= q), 90, 90, batch=2, heads=3)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_whole_number_arithmetic_wraps_as_torch_does() -> None:
    byte_S = torch.arange(300).to(torch.int8)
    exact(lambda b, h, q, k: byte_S[q] - byte_S[k] > 0, 300, 300)
    large_S = torch.arange(100) + (1 << 62)
    exact(lambda b, h, q, k: large_S[q] + large_S[k] > 0, 100, 100)
    exact(lambda b, h, q, k: (q * 40000 + k).to(torch.int32) > (k * 30000).to(torch.int32), 100, 100)


def test_extreme_thresholds() -> None:
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    limit_Q = torch.tensor([low, -1, 0, 3, high])
    key_K = torch.tensor([low, 5, high, 0, low, 2])
    for sequence in (key_K, key_K.sort().values, key_K.sort(descending=True).values):
        for compare in (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne):
            exact(lambda b, h, q, k, s=sequence, f=compare: f(s[k], limit_Q[q]), 5, 6)
            exact(lambda b, h, q, k, s=sequence, f=compare: ~f(limit_Q[q], s[k]), 5, 6)


def test_floating_point_comparisons() -> None:
    generator = torch.Generator().manual_seed(0)
    real_S = torch.randn(140, generator=generator)
    real_S[::7], real_S[1::11] = float("nan"), float("inf")
    zero_S = torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(35)
    for compare in (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne):
        exact(lambda b, h, q, k, f=compare: f(real_S[q], real_S[k]), 130, 140)
        exact(lambda b, h, q, k, f=compare: f(zero_S[q], zero_S[k]), 130, 140)
        exact(lambda b, h, q, k, f=compare: f(q - k, real_S[q] * 40), 130, 140)
        exact(lambda b, h, q, k, f=compare: f(k, q / 2), 130, 140)
        exact(lambda b, h, q, k, f=compare: f(k + 16777210, q + 16777211.0), 30, 30)  # float32 rounds here
        exact(lambda b, h, q, k, f=compare: f(k, real_S.double()[q]), 130, 140)
        exact(lambda b, h, q, k, f=compare: f(k.to(torch.bfloat16), q), 300, 300)


def test_floor_and_truncated_division_of_negative_numbers() -> None:
    for divide in (
        lambda x: x // 7,
        lambda x: torch.div(x, 7, rounding_mode="trunc"),
        lambda x: x % 7,
        lambda x: torch.fmod(x, 7),
    ):
        exact(lambda b, h, q, k, f=divide: f(q - k) <= 2, 50, 60)
        exact(lambda b, h, q, k, f=divide: f(q - k) == -1, 50, 60)
        exact(lambda b, h, q, k, f=divide: f(k - q) < f(q - k), 30, 30)


def test_negative_indices_wrap_as_torch_does() -> None:
    table_S = torch.arange(100) // 9
    exact(lambda b, h, q, k: table_S[q - 100] == table_S[k - 100], 100, 100)


# ---- indexing --------------------------------------------------------------------------------------------------------


def test_indexing_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    table_QK = torch.rand(50, 60, generator=generator) < 0.5
    table_HQK = torch.rand(2, 50, 60, generator=generator) < 0.5
    for mask_mod in (
        lambda b, h, q, k: table_QK[q][k],
        lambda b, h, q, k: table_QK[q, :][k],
        lambda b, h, q, k: table_QK[..., k][q],
        lambda b, h, q, k: table_HQK[h][q, k],
        lambda b, h, q, k: table_HQK[0, q, k] | table_HQK[-1, q, 3],
        lambda b, h, q, k: table_QK[:, 3][q],
    ):
        plan = plan_from_mask_mod(mask_mod, 1, 2, 50, 60)
        for h, q, k in ((0, 3, 7), (1, 49, 59), (1, 0, 0), (0, 20, 31)):
            want = bool(mask_mod(torch.tensor(0), torch.tensor(h), torch.tensor(q), torch.tensor(k)))
            assert bool(plan.to_dense().expand(1, 2, 50, 60)[0, h, q, k]) == want


def test_a_reduction_over_a_captured_row() -> None:
    token_QN = torch.randint(0, 90, (80, 5), generator=torch.Generator().manual_seed(0))
    plan = plan_from_mask_mod(lambda b, h, q, k: (token_QN[q] == k).any(), 1, 1, 80, 90)
    want = (token_QN[:, None] == torch.arange(90)[:, None]).any(2)
    assert torch.equal(plan.to_dense()[0, 0], want)


def test_no_index_past_the_lengths() -> None:
    """A captured bool [S] with S no multiple of any block: reading past it would raise."""
    flag_S = torch.rand(2046, generator=torch.Generator().manual_seed(0)) < 0.5
    exact(lambda b, h, q, k: flag_S[q] & flag_S[k] & (k <= q), 2046, 2046)
    with pytest.raises((IndexError, UnsupportedMask)):
        plan_from_mask_mod(lambda b, h, q, k: flag_S[k], 1, 1, 10, 2047)


@pytest.mark.parametrize("q_len,kv_len", [(0, 0), (0, 5), (5, 0)])
def test_empty_lengths(q_len: int, kv_len: int) -> None:
    plan = plan_from_mask_mod(lambda b, h, q, k: k <= q, 1, 1, q_len, kv_len)
    assert plan.to_dense().shape[-2:] == (q_len, kv_len) and plan.area() == 0


def test_numbers_among_the_captures() -> None:
    """Sizes in graphs with dynamic shapes are plain numbers."""
    steps = [["arg"]] * 7 + [
        ["call", "aten::sub", "Tensor", [{"node": 3}, {"node": 4}], {}],
        ["call", "aten::le", "Tensor", [{"node": 7}, {"node": 2}], {}],
        ["call", "aten::lt", "Scalar", [{"node": 3}, {"node": 5}], {}],
        ["call", "aten::sub", "Tensor", [{"node": 2}, {"node": 3}], {}],
        ["call", "aten::remainder", "Scalar", [{"node": 10}, {"node": 6}], {}],
        ["call", "aten::eq", "Scalar", [{"node": 11}, 1], {}],
        ["call", "aten::bitwise_and", "Tensor", [{"node": 8}, {"node": 9}], {}],
        ["call", "aten::bitwise_or", "Tensor", [{"node": 13}, {"node": 12}], {}],
        ["return", {"node": 14}],
    ]
    plan = plan_from_program(FxProgram(tuple(steps)), [7, 20.5, 50], 1, 1, 60, 70)
    q, k = torch.arange(60)[:, None], torch.arange(70)
    assert torch.equal(plan.to_dense()[0, 0], (k - 7 <= q) & (k < 20.5) | ((q - k) % 50 == 1))


# ---- programs from compiled graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["document_causal", "natten_3d", "block_diffusion", "per_head_mix"])
def test_graphs_with_other_spellings_of_the_operators(name: str) -> None:
    """The graph of a tracer with decompositions: div for //, convert_element_type, int32 indices."""
    from torch._inductor.decomposition import select_decomp_table

    case = make_mask(name, 200, 150)
    index = [torch.zeros(1, 1, 1, 1, dtype=torch.int32) for _ in range(4)]
    graph = make_fx(case.mask_mod, decomposition_table=select_decomp_table())(*index)
    captures = []
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            captures.append(getattr(graph, node.target))
            with graph.graph.inserting_after([n for n in graph.graph.nodes if n.op == "placeholder"][-1]):
                placeholder = graph.graph.placeholder(f"capture_{len(captures)}")
            node.replace_all_uses_with(placeholder)
            graph.graph.erase_node(node)
    plan = plan_from_program(FxProgram.from_graph(graph), captures, case.batch, case.heads, 200, 150)
    check_exact(plan, case)


# ---- errors ----------------------------------------------------------------------------------------------------------

_table_S = torch.arange(10)


@pytest.mark.parametrize(
    "mask_mod,message",
    [
        (lambda b, h, q, k: q >= k and k > 2, "cannot branch on data"),
        (lambda b, h, q, k: q.item() >= k, "cannot branch on data"),
        (lambda b, h, q, k: [0, 1][q] == k, "a list's index"),
        (lambda b, h, q, k: np.arange(9)[q] == k, "tensors for tables"),
        (lambda b, h, q, k: q - k, "returned torch.int64"),
        (lambda b, h, q, k: _table_S > q, r"returned torch.bool of shape \(10,\)"),
        (lambda b, h, q, k: None, "returned NoneType"),
        (lambda b, h, q, k: q.add_(1) > k, "writes in place"),
        (lambda b, h, q, k: _table_S.add_(1)[q] > k, "writes in place"),
        (lambda b, h, q, k: torch.rand(()) > q, "random numbers"),
        (lambda b, h, q, k: q.sum() > k, "given a value for one"),
        (lambda b, h, q, k: k.max() > q, "given a value for one"),
        (lambda b, h, q, k: _table_S[q].cumsum(0) > k, "given a value for one"),
        (lambda b, h, q, k: q.sort().values > k, "only operators that return one tensor"),
        (lambda b, h, q, k: _table_S[q, k] > 0, "2 indices for a tensor of shape"),
        (lambda b, h, q, k: _table_S[None, q] > 0, "an index of type NoneType"),
        (lambda b, h, q, k: _table_S[1:, None][q] > 0, "returned torch.bool of shape"),
        (5, "a callable"),
    ],
)
def test_errors_say_what_is_wrong(mask_mod: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from_mask_mod(mask_mod, 1, 1, 4, 4)
    assert torch.equal(_table_S, torch.arange(10))


def test_error_names_a_capture_on_another_device() -> None:
    table_S = torch.empty(10, device="meta")
    with pytest.raises(UnsupportedMask, match="captured tensor 0 .* is on meta, but the mask is built on cpu"):
        plan_from_mask_mod(lambda b, h, q, k: table_S[q] > 0, 1, 1, 4, 4)


def test_mask_mod_error_is_a_value_error() -> None:
    assert issubclass(MaskModError, ValueError) and issubclass(UnsupportedMask, ValueError)
