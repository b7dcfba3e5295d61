"""Exchange plans against brute force on dense masks: exact keys, each moved once, local problems equal the mask."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex.distributed.agreement import mask_checksum
from magi_flex.distributed.dispatch import (
    Dispatch,
    chunk_areas,
    dispatch_min_heap,
    dtensor_row_counts,
    even_row_counts,
    solve_dispatch,
)
from magi_flex.distributed.exchange_plan import ExchangePlan, build_exchange_plan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.workloads import document_mask, draw_document_lengths
from magi_flex.intervals import RowIntervals
from tests.cases.masks import MASKS, make_mask


def cast_all(plans: list[GroupPlan], inputs: list[Tensor]) -> list[Tensor]:
    """What group_cast does, for all ranks in one process."""
    sent = [list(x[p.send_index].split(p.send_counts.tolist())) for p, x in zip(plans, inputs, strict=True)]
    outputs = []
    for rank, plan in enumerate(plans):
        assert plan.recv_counts.tolist() == [int(p.send_counts[rank]) for p in plans]
        received = torch.cat([parts[rank] for parts in sent])
        assert torch.equal(plan.recv_index.sort().values, torch.arange(plan.out_rows))
        output = torch.full((plan.out_rows,), -1, dtype=torch.int64)
        output[plan.recv_index] = received
        outputs.append(output)
    return outputs


def check_plans(
    dense: Tensor, plans: list[ExchangePlan], q_dispatch: Dispatch, kv_dispatch: Dispatch, per_node: int
) -> None:
    ranks = len(plans)
    seen = dense.any(0).any(0)  # [Q, K]
    need = [set(seen[q_dispatch.rows(r)].any(0).nonzero()[:, 0].tolist()) for r in range(ranks)]
    own = [set(kv_dispatch.rows(r).tolist()) for r in range(ranks)]
    held = [kv_dispatch.rows(r) for r in range(ranks)]
    moved = [0] * ranks
    network = 0
    for stage in range(len(plans[0].stages)):
        hops = [plan.stages[stage].hops for plan in plans]
        rows = cast_all([h[0] for h in hops], held)
        if len(hops[0]) == 2:
            for rank, hop in enumerate(hops):
                same_node = hop[0].recv_counts.view(-1, per_node)[rank // per_node]
                assert int(same_node.sum()) == 0
                others = torch.ones(ranks // per_node, dtype=torch.bool)
                others[rank // per_node] = False
                assert int(hop[1].recv_counts.view(-1, per_node)[others].sum()) == 0
            network += sum(len(x) for x in rows)
            rows = cast_all([h[1] for h in hops], [torch.cat(pair) for pair in zip(held, rows, strict=True)])
        for rank, plan in enumerate(plans):
            keys = plan.stages[stage].keys
            assert torch.equal(rows[rank], keys)
            moved[rank] += len(keys)
            assert torch.equal(plan.stages[stage].mask.to_dense(), dense[:, :, plan.rows][..., keys])
    for rank, plan in enumerate(plans):
        arrived = torch.cat([stage.keys for stage in plan.stages]).tolist()
        assert len(arrived) == len(set(arrived)) == moved[rank]  # no key twice
        assert set(arrived) == need[rank] - own[rank]  # and none that is not needed
        assert torch.equal(plan.mask.to_dense(), dense[:, :, plan.rows][..., plan.keys])
        assert torch.equal(plan.rows, q_dispatch.rows(rank)) and torch.equal(plan.keys, kv_dispatch.rows(rank))
    if per_node > 1:
        nodes = range(ranks // per_node)
        unique = 0
        for node in nodes:
            members = range(node * per_node, (node + 1) * per_node)
            unique += len(set().union(*(need[r] for r in members)) - set().union(*(own[r] for r in members)))
        assert network == unique


def solve_all(
    mask: RowIntervals, q_dispatch: Dispatch, kv_dispatch: Dispatch, stages: int, per_node: int
) -> list[ExchangePlan]:
    needed = needed_ranges(mask, q_dispatch)
    return [
        build_exchange_plan(mask, q_dispatch, kv_dispatch, rank, needed, stages, per_node)
        for rank in range(q_dispatch.ranks)
    ]


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    for length, ranks, stages, per_node in ((1, 2, 1, 1), (5, 3, 2, 1), (129, 4, 3, 1), (129, 4, 2, 2), (127, 6, 1, 3)):
        dense = make_mask(name, length).dense()
        mask = RowIntervals.from_dense(dense)
        dispatch = solve_dispatch([mask], dtensor_row_counts(length, ranks), chunk_size=4)
        plans = solve_all(mask, dispatch, dispatch, stages, 1 if per_node == 1 else per_node)
        check_plans(dense, plans, dispatch, dispatch, per_node)
        for plan in plans:
            assert plan.mask.max_intervals == mask.max_intervals
            assert all(stage.mask.max_intervals == mask.max_intervals for stage in plan.stages)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_masks_and_dispatches(data: st.DataObject) -> None:
    """Q != KV, any owner for any row or key, batch and head dependent masks, ranks without rows or keys."""
    q_len, kv_len = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    per_node, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    ranks = per_node * nodes
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(batch, heads, q_len, kv_len, generator=generator) < data.draw(st.sampled_from([0.05, 0.3, 0.9]))
    mask = RowIntervals.from_dense(dense)
    dispatches = []
    for length in (q_len, kv_len):
        owner = torch.randint(0, ranks, (length,), generator=generator)
        row = torch.arange(length)
        dispatches.append(Dispatch.from_segments(length, ranks, owner, row, row + 1))
    per_node = 1 if nodes == 1 else per_node
    plans = solve_all(mask, *dispatches, data.draw(st.integers(1, 4)), per_node)
    check_plans(dense, plans, *dispatches, per_node)
    needed = needed_ranges(mask, dispatches[0])
    for rank in range(ranks):
        plan = build_exchange_plan(mask, *dispatches, rank, needed, 1, per_node, joined=True)
        stage = plan.joined
        remote = torch.cat([x.keys for x in plans[rank].stages])
        assert torch.equal(stage.keys, torch.cat((plan.keys, remote)).sort()[0])
        assert torch.equal(stage.keys[stage.own], plan.keys)
        arriving = torch.ones(len(stage.keys), dtype=torch.bool).index_fill_(0, stage.own, False)
        assert torch.equal(stage.hops[-1].recv_index.sort()[0], arriving.nonzero()[:, 0])
        assert torch.equal(stage.mask.to_dense(), dense[:, :, plan.rows][..., stage.keys])


def test_stages_carry_equal_loads() -> None:
    mask = RowIntervals.full(1024, 1024)
    dispatch = Dispatch.contiguous(1024, even_row_counts(1024, 4))
    for plan in solve_all(mask, dispatch, dispatch, 4, 1):
        assert [len(stage.keys) for stage in plan.stages] == [192] * 4
        for stage in plan.stages:
            counts = stage.hops[0].recv_counts.tolist()
            assert sorted(counts) == [0, 64, 64, 64]


def test_ranges_of_a_rank_do_not_depend_on_the_others() -> None:
    """Solved in parallel parts, each rank for its own rows, the ranges are those that one rank finds for all."""
    mask = document_mask(draw_document_lengths(1 << 16, 0))
    dispatch = solve_dispatch([mask], even_row_counts(1 << 16, 16))
    whole = needed_ranges(mask, dispatch)
    for rank in range(16):
        own, part = needed_ranges(mask, dispatch, [rank]), slice(*whole.ptr[rank : rank + 2].tolist())
        assert torch.equal(own.begin, whole.begin[part]) and torch.equal(own.end, whole.end[part])


def cpu_seconds(work) -> float:
    times = []
    for _ in range(7):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def test_planning_4m_tokens_over_512_ranks() -> None:
    """One core: everything aims at 0.5 s; a rank's own part, areas and ranges solved in parallel parts, at 50 ms.
    Twice that is allowed, as other processes may slow this one down; benchmarks/bench_dispatch.py has the figures."""
    length, ranks = 1 << 22, 512
    lengths = draw_document_lengths(length, 0)
    counts = even_row_counts(length, ranks)
    mask = document_mask(lengths)
    rank = 17

    def whole() -> None:
        dispatch = solve_dispatch([mask], counts)
        build_exchange_plan(mask, dispatch, dispatch, rank, needed_ranges(mask, dispatch), 4, 8)

    area_MC = chunk_areas(mask, 128)[None]
    needed = needed_ranges(mask, solve_dispatch([mask], counts))

    def part() -> None:
        mask_checksum(mask)
        chunk_areas(mask, 128, 0, length // 128 // ranks)
        dispatch = solve_dispatch([mask], counts, 128, area_MC=area_MC)
        needed_ranges(mask, dispatch, [rank])
        dispatch.order()
        plan = build_exchange_plan(mask, dispatch, dispatch, rank, needed, 4, 8)
        assert plan.nbytes < 64 * (len(plan.rows) + len(plan.keys) + sum(len(s.keys) for s in plan.stages)) + (1 << 20)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert cpu_seconds(whole) < 1
        assert cpu_seconds(part) < 0.1
    finally:
        torch.set_num_threads(threads)


def test_min_heap_dispatch_also_plans() -> None:
    dense = make_mask("document_causal", 257).dense()
    mask = RowIntervals.from_dense(dense)
    dispatch = dispatch_min_heap(chunk_areas(mask, 8), 8, 257, even_row_counts(257, 4))
    check_plans(dense, solve_all(mask, dispatch, dispatch, 2, 2), dispatch, dispatch, 2)


def test_faults() -> None:
    mask = RowIntervals.full(8, 8)
    dispatch = Dispatch.contiguous(8, [4, 4])
    needed = needed_ranges(mask, dispatch)
    with pytest.raises(ValueError, match="stages: got 0"):
        build_exchange_plan(mask, dispatch, dispatch, 0, needed, 0)
    with pytest.raises(ValueError, match="joined: allowed with one stage"):
        build_exchange_plan(mask, dispatch, dispatch, 0, needed, 2, joined=True)
    with pytest.raises(ValueError, match="must divide the 2 ranks"):
        build_exchange_plan(mask, dispatch, dispatch, 0, needed, 1, 3)
    with pytest.raises(ValueError, match="9 x 9"):
        build_exchange_plan(RowIntervals.full(9, 9), dispatch, dispatch, 0, needed)
    with pytest.raises(ValueError, match="three must agree"):
        build_exchange_plan(mask, dispatch, Dispatch.contiguous(8, [4, 4, 0]), 0, needed)


def test_group_plan_from_splits_and_its_faults() -> None:
    plans = [
        GroupPlan.from_splits([2, 1, 3], [[0, 1], [], [1]], [2], [0], 2),
        GroupPlan.from_splits([], [], [3, 2], [0, 0], 2),
    ]
    inputs = [torch.arange(6), torch.zeros(0, dtype=torch.int64)]
    # The pair (0 -> 1) sends blocks of 2 and 3 rows, rank 1 lays the five rows out in its own blocks, in order.
    assert [x.tolist() for x in cast_all(plans, inputs)] == [[0, 1], [0, 1, 3, 4, 5]]
    with pytest.raises(ValueError, match="one for each"):
        GroupPlan.from_splits([1], [], [], [], 2)
    with pytest.raises(ValueError, match="allowed are 0 to 1"):
        GroupPlan.from_splits([1], [[2]], [], [], 2)
    with pytest.raises(ValueError, match="once"):
        GroupPlan.from_splits([1], [[1, 1]], [], [], 2)
    with pytest.raises(ValueError, match="at least 0"):
        GroupPlan.from_splits([-1], [[1]], [], [], 2)
