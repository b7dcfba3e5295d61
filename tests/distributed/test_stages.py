"""Attention in stages on gloo against the dense float64 reference: every mask, odd lengths, 1 to 8 ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import mask_checksum
from magi_flex.distributed.attention_plan import AttentionPlan
from magi_flex.distributed.cost_model import Costs, Shape
from magi_flex.distributed.dispatch import Dispatch, dtensor_row_counts, expand_ranges, solve_dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.head_groups import GroupedAttention
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.mask_forms import to_intervals, to_plan
from magi_flex.distributed.measure import measure_costs
from magi_flex.distributed.planning import Needed, check_masks, gather_dispatch, gather_needed
from magi_flex.distributed.query_exchange import choose_pairs, gather_pair_counts
from magi_flex.distributed.stages import StagedAttention
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION, Timeline, chrome_trace
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.merge import merge_lse
from magi_flex.kernels.request import AttentionGradients
from magi_flex.mask_outline import Outline
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.distributed.world import World

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
BATCH = 2


def inputs(q_len: int, kv_len: int, dtype: torch.dtype, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """q, k, v, d_out, d_lse; the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (BATCH, heads, q_len, DIM),
        (BATCH, kv_heads, kv_len, DIM),
        (BATCH, kv_heads, kv_len, V_DIM),
        (BATCH, heads, q_len, V_DIM),
        (BATCH, heads, q_len),
    )
    x = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype) for t in x[:4]] + [x[4].to(torch.promote_types(dtype, torch.float32))]


def plan_part(
    mask: RowIntervals,
    group: dist.ProcessGroup,
    stages: int,
    per_node: int,
    moved: Tensor | None = None,
    head_groups: int | None = None,
) -> tuple[AttentionPlan, Dispatch, Dispatch]:
    q_dispatch = gather_dispatch([mask], dtensor_row_counts(mask.q_len, group.size()), group)
    kv_dispatch = q_dispatch
    if mask.kv_len != mask.q_len:
        kv_dispatch = Dispatch.contiguous(mask.kv_len, dtensor_row_counts(mask.kv_len, group.size()))
    needed = gather_needed([mask], q_dispatch, group)[0].ranges
    common = (mask, q_dispatch, kv_dispatch, group.rank(), needed)
    if head_groups is None:
        part = build_exchange_plan(*common, stages, per_node, moved)
    else:
        part = build_exchange_plan(*common, 1, per_node, joined=True)
    return AttentionPlan.from_exchange(part, "cpu", head_groups or 1), q_dispatch, kv_dispatch


def run(
    group: dist.ProcessGroup,
    mask: RowIntervals,
    tensors: list[Tensor],
    stages: int = 2,
    per_node: int = 1,
    keep_keys: bool = False,
    timeline: Timeline | None = None,
    moved: Tensor | None = None,
    head_groups: int | None = None,
) -> list[Tensor]:
    """out, lse, max_score, dq, dk, dv of the whole problem, put together from all ranks.

    In stages of keys, or in so many groups of heads.
    """
    plan, q_dispatch, kv_dispatch = plan_part(mask, group, stages, per_node, moved, head_groups)
    q, k, v, d_out, d_lse = tensors
    rows, keys = plan.rows, plan.keys
    kind = StagedAttention if head_groups is None else GroupedAttention
    staged = kind(plan, group, DIM**-0.5, timeline=timeline)
    local = [q[:, :, rows], k[:, :, keys], v[:, :, keys]]
    result, kept = staged.forward(*local, keep_keys=keep_keys)
    assert result.out.dtype == q.dtype
    grads = staged.backward(
        *local, result.out, result.lse, d_out[:, :, rows], d_lse[:, :, rows], kept if keep_keys else None
    )
    assert isinstance(grads, AttentionGradients) and grads.dk.dtype == k.dtype
    parts: list[list[Tensor]] = [None] * group.size()  # type: ignore[list-item]
    own = [result.out, result.lse, result.max_score, grads.dq, grads.dk, grads.dv]
    dist.all_gather_object(parts, own, group=group)
    whole = []
    for of_rank, dispatch in zip(zip(*parts, strict=True), (q_dispatch,) * 4 + (kv_dispatch,) * 2, strict=True):
        gathered = torch.cat(of_rank, 2)
        whole.append(torch.empty_like(gathered).index_copy_(2, dispatch.order().long(), gathered))
    return whole


def check_mask(
    group: dist.ProcessGroup,
    names: list[str],
    length: int,
    kv_len: int,
    stages: int,
    per_node: int,
    head_groups: int | None = None,
) -> None:
    for i, name in enumerate(names):
        case = make_mask(name, length, kv_len)
        if case.batch > BATCH or case.heads not in (1, HEADS):
            dense = case.dense()[:BATCH, :1]
        else:
            dense = case.dense()
        tensors = inputs(length, kv_len, torch.float64)
        expected = dense_attention_with_gradients(*tensors, mask_BHQK=dense)
        mask = RowIntervals.from_dense(dense)
        actual = run(group, mask, tensors, stages, per_node, keep_keys=i % 2 == 0, head_groups=head_groups)
        wanted = (expected.out, expected.lse, expected.max_score, expected.dq, expected.dk, expected.dv)
        for what, a, e in zip(("out", "lse", "max", "dq", "dk", "dv"), actual, wanted, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, w=what: f"{n} {w}: {m}")


@pytest.mark.parametrize(
    "ranks,length,kv_len,stages,per_node",
    [(1, 33, 33, 1, 1), (2, 67, 67, 3, 1), (3, 29, 41, 1, 1), (4, 67, 67, 2, 2), (6, 41, 23, 2, 3), (8, 37, 37, 2, 4)],
)
def test_every_mask(world: World, ranks: int, length: int, kv_len: int, stages: int, per_node: int) -> None:
    """float64, outputs and all gradients (also through lse), flat and on two levels, keys kept and fetched again; half
    of the masks on many ranks."""
    world.run(check_mask, ranks, list(MASKS)[:: 1 if ranks < 6 else 2], length, kv_len, stages, per_node)


@pytest.mark.parametrize(
    "ranks,length,kv_len,head_groups,per_node",
    [(1, 33, 33, 2, 1), (2, 67, 67, 2, 1), (3, 29, 41, 1, 1), (6, 41, 23, 2, 3), (8, 5, 37, 1, 4)],
)
def test_every_mask_by_heads(
    world: World, ranks: int, length: int, kv_len: int, head_groups: int, per_node: int
) -> None:
    names = list(MASKS) if ranks < 6 else list(MASKS)[1::2]
    world.run(check_mask, ranks, names, length, kv_len, 1, per_node, head_groups)


def check_moved_queries(group: dist.ProcessGroup, names: list[str], q_len: int, kv_len: int, per_node: int) -> None:
    """Queries travel for random pairs of ranks, keys for the others."""
    ranks = group.size()
    for i, name in enumerate(names):
        dense = make_mask(name, q_len, kv_len).dense()[:BATCH, :1]
        tensors = inputs(q_len, kv_len, torch.float64)
        expected = dense_attention_with_gradients(*tensors, mask_BHQK=dense)
        moved = torch.rand(ranks, ranks, generator=torch.Generator().manual_seed(i)) < 0.5
        moved.fill_diagonal_(False)
        mask = RowIntervals.from_dense(dense)
        plan, *_ = plan_part(mask, group, 2, per_node, moved)
        assert plan.visiting is not None
        wanted = (expected.out, expected.lse, expected.max_score, expected.dq, expected.dk, expected.dv)
        actual = run(group, mask, tensors, 2, per_node, moved=moved)
        for what, a, e in zip(("out", "lse", "max", "dq", "dk", "dv"), actual, wanted, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, w=what: f"{n} {w}: {m}")


@pytest.mark.parametrize("ranks,q_len,kv_len,per_node", [(3, 37, 37, 1), (4, 9, 50, 2)])
def test_moved_queries(world: World, ranks: int, q_len: int, kv_len: int, per_node: int) -> None:
    world.run(check_moved_queries, ranks, list(MASKS)[::3], q_len, kv_len, per_node)


def check_choice(group: dist.ProcessGroup) -> None:
    """Few rows over many keys: queries move.  Long self-attention with few key heads: keys do.  Counts are exact."""
    for q_len, kv_len, shape, expected in (
        (8, 2048, Shape(8, 8, 64, 64), True),
        (512, 512, Shape(64, 8, 128, 128), False),
    ):
        dense = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]
        mask = RowIntervals.from_dense(dense)
        q_dispatch, kv_dispatch = (Dispatch.contiguous(n, dtensor_row_counts(n, group.size())) for n in (q_len, kv_len))
        needed = gather_needed([mask], q_dispatch, group)[0].ranges
        counts = gather_pair_counts(mask, q_dispatch, kv_dispatch, needed, group)
        for r in range(group.size()):
            for s in range(group.size()):
                block = dense[0, 0][q_dispatch.rows(r)][:, kv_dispatch.rows(s)]
                assert counts.rows[r, s] == block.any(1).sum() and counts.keys[r, s] == block.any(0).sum()
                assert counts.area[r, s] == block.sum()
        for backward in (False, True):
            assert choose_pairs(counts, shape, Costs(), backward, 40e9).any() == expected


def check_measured(group: dist.ProcessGroup) -> Costs:
    return measure_costs(Shape(2, 2, 16, 16, 1, 4), torch.float32, group, rows=256, message_bytes=1 << 16)


def test_measured_costs_are_the_same_on_every_rank(world: World) -> None:
    first, second = world.run(check_measured, 2)
    assert first == second
    assert min(vars(first).values()) > 0 and first.launch == Costs().launch


def test_choice_between_queries_and_keys(world: World) -> None:
    world.run(check_choice, 4)


def check_rounding(group: dist.ProcessGroup, dtype: torch.dtype) -> list[float]:
    """Within twice the error of dense attention at the same precision; returns the largest gradient errors."""
    length = 129
    mask = RowIntervals.from_dense(make_mask("document_causal", length).dense())
    tensors = inputs(length, length, dtype)
    dense = mask.to_dense()
    reference = dense_attention_with_gradients(*tensors, mask_BHQK=dense)
    same = dense_attention_with_gradients(*tensors, mask_BHQK=dense, dtype=dtype)
    out, lse, _, dq, dk, dv = run(group, mask, tensors, 2)
    errors = []
    for actual, name in ((out, "out"), (lse, "lse"), (dq, "dq"), (dk, "dk"), (dv, "dv")):
        assert_within_factor(actual, getattr(same, name), getattr(reference, name))
        errors.append(float((actual.double() - getattr(reference, name)).abs().max()))
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_do_not_grow_with_ranks(world: World, dtype: torch.dtype) -> None:
    one = world.run(check_rounding, 1, dtype)[0]
    eight = world.run(check_rounding, 8, dtype)[0]
    for a, b in zip(one, eight, strict=True):
        assert b <= 2 * a + 1e-7


def check_bits_groups_and_low_precision(group: dist.ProcessGroup) -> None:
    """Bit tiles, 9 query and 3 key heads, bfloat16, an odd length, two levels, all at once."""
    mask = RowIntervals.from_dense(make_mask("dense_table", 257).dense())
    plan, *_ = plan_part(mask, group, 2, 3)
    assert all(key_set.mask.bit_tiles is not None for key_set in plan.sets)
    tensors = inputs(257, 257, torch.bfloat16, 9, 3)
    exact = dense_attention_with_gradients(*tensors, mask_BHQK=mask.to_dense())
    same = dense_attention_with_gradients(*tensors, mask_BHQK=mask.to_dense(), dtype=torch.bfloat16)
    out, lse, _, dq, dk, dv = run(group, mask, tensors, 2, 3)
    for actual, name in ((out, "out"), (lse, "lse"), (dq, "dq"), (dk, "dk"), (dv, "dv")):
        assert_within_factor(actual, getattr(same, name), getattr(exact, name))


def test_bits_groups_and_low_precision(world: World) -> None:
    world.run(check_bits_groups_and_low_precision, 6)


def check_timeline(group: dist.ProcessGroup) -> tuple[dict, list]:
    length = 257
    mask = RowIntervals.from_dense(make_mask("causal", length).dense())
    timeline = Timeline()
    run(group, mask, inputs(length, length, torch.float32), 3, timeline=timeline)
    return chrome_trace({group.rank(): timeline.spans()}), timeline.spans()


def test_timeline_shows_the_overlap(world: World, tmp_path) -> None:
    for rank, (trace, spans) in enumerate(world.run(check_timeline, 2)):
        json.dumps(trace)
        assert {span.lane for span in spans} == {COMPUTE, NETWORK, REDUCTION}
        assert all(span.end >= span.begin for span in spans)
        names = {span.name for span in spans}
        for stage in range(3):
            for name in ("forward", "backward", "keys of", "gradients of"):
                assert f"{name} stage {stage}" in names
        begun = {span.name: span.begin for span in spans if span.lane != NETWORK}
        keys = [span.begin for span in spans if span.name.startswith("keys of")][:3]
        # The keys of two stages are sent for before the local keys are computed, those of stage 2 before stage 0 is.
        assert keys[0] < keys[1] < begun["forward local"] < keys[2] < begun["forward stage 0"]
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(events) == len(spans) and all(event["pid"] == rank for event in events)


def check_agreement(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    mask = RowIntervals.full(64, 64)
    check_masks([mask], group)
    other = RowIntervals.build(mask.starts, mask.ends - (torch.arange(64) == 63).int() * (rank == 2), 64)
    with pytest.raises(ValueError, match=r"ranks \[2\] were given something else"):
        check_masks([other], group)
    with pytest.raises(ValueError, match=r"ranks \[1, 2\]"):
        check_masks([RowIntervals.full(64, 64 + rank)] if rank < 2 else [mask, mask], group)
    check_masks([mask], group)  # and the group is still in step


def test_other_masks_are_an_error_on_every_rank(world: World) -> None:
    world.run(check_agreement, 3)


def test_checksum_sees_every_element_and_its_place() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 1000, (1, 1, 2, 5003), generator=generator, dtype=torch.int32)
    seen = {tuple(mask_checksum(RowIntervals(starts, starts, 1000)).tolist())}
    for i in range(0, 5003, 37):
        changed = starts.clone()
        changed[0, 0, i % 2, i] += 1
        swapped = starts.clone()
        swapped[0, 0, 0, [i, i - 1]] = starts[0, 0, 0, [i - 1, i]]
        new = [changed] + ([swapped] if not torch.equal(swapped, starts) else [])
        for x in new:
            seen_before = len(seen)
            seen.add(tuple(mask_checksum(RowIntervals(x, starts, 1000)).tolist()))
            assert len(seen) == seen_before + 1


@pytest.mark.parametrize("name", ["bigbird", "selected_blocks", "dense_table", "dilated", "causal", "nothing"])
def test_mask_forms_keep_the_mask(name: str) -> None:
    dense = make_mask(name, 300).dense()
    for plan in (MaskPlan.from_dense(dense), MaskPlan(RowIntervals.from_dense(dense))):
        intervals = to_intervals(plan)
        assert torch.equal(intervals.to_dense(), dense)
        assert torch.equal(to_plan(intervals).to_dense(), dense)


def test_merge_of_empty_and_infinite_parts() -> None:
    inf = torch.inf
    out_a, out_b = torch.tensor([[1.0], [2.0], [0.0], [4.0]]), torch.tensor([[3.0], [0.0], [0.0], [8.0]])
    lse_a, lse_b = torch.tensor([1.0, 5.0, -inf, 3000.0]), torch.tensor([1.0, -inf, -inf, -3000.0])
    out, lse = merge_lse(out_a, lse_a, out_b, lse_b)
    assert out.flatten().tolist() == [2, 2, 0, 4]
    assert lse.tolist() == [2, 5, -inf, 3000]


def check_shapes(group: dist.ProcessGroup) -> None:
    plan, *_ = plan_part(RowIntervals.full(9, 9), group, 1, 1)
    staged = StagedAttention(plan, group, 1.0)
    x = torch.zeros(1, 1, 9, 4)
    with pytest.raises(ValueError, match="q: has shape .* needs 4 dimensions and"):
        staged.forward(x, x, x)


def test_wrong_shapes(world: World) -> None:
    world.run(check_shapes, 2)


def test_solver_is_the_same_in_parts(world: World) -> None:
    mask = RowIntervals.from_dense(make_mask("document_causal", 257).dense())
    masks = [mask, RowIntervals.empty(257, 257), RowIntervals.from_dense(make_mask("bigbird", 257).dense())]
    expected = solve_dispatch([mask], dtensor_row_counts(257, 4))
    for dispatch, needed in world.run(_gathered, 4, masks):
        assert torch.equal(dispatch.begin, expected.begin) and torch.equal(dispatch.end, expected.end)
        for (ranges, spreads), of in zip(needed, masks, strict=True):
            whole = needed_ranges(of, expected)
            for name in ("ptr", "begin", "end"):
                assert torch.equal(getattr(ranges, name), getattr(whole, name))
            for rank, spread in enumerate(spreads):
                part = slice(int(whole.ptr[rank]), int(whole.ptr[rank + 1]))
                keys = expand_ranges(whole.begin[part], whole.end[part])
                assert spread == Outline.of(of.take_rows(expected.rows(rank)).take_keys(keys)).spread()


def _gathered(group: dist.ProcessGroup, masks: list[RowIntervals]) -> tuple[Dispatch, list[Needed]]:
    dispatch = gather_dispatch(masks[:1], dtensor_row_counts(masks[0].q_len, group.size()), group)
    return dispatch, gather_needed(masks, dispatch, group)
