"""group_cast and group_reduce on gloo against the same thing done on all ranks' rows in one place."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed import group_work
from magi_flex.distributed.dispatch import Dispatch
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.group_collective import group_cast, group_reduce, verify_group_plan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import needed_ranges
from magi_flex.distributed.sequence import roll_plan
from magi_flex.distributed.transport import RowExchange
from magi_flex.intervals import RowIntervals
from tests.distributed.world import World

ROWS = 23


def _problem(ranks: int, per_node: int, rank: int, seed: int = 0):
    """(plan, keys by owner, keys that each rank gets): a random mask over keys with random owners."""
    generator = torch.Generator().manual_seed(seed)
    mask = RowIntervals.from_dense(torch.rand(1, 1, ROWS, ROWS, generator=generator) < 0.3)
    dispatches = []
    for _ in range(2):
        owner, row = torch.randint(0, ranks, (ROWS,), generator=generator), torch.arange(ROWS)
        dispatches.append(Dispatch.from_segments(ROWS, ranks, owner, row, row + 1))
    needed = needed_ranges(mask, dispatches[0])
    plans = [build_exchange_plan(mask, *dispatches, r, needed, 1, per_node) for r in range(ranks)]
    stages = [plan.stages[0] for plan in plans]
    return stages[rank].hops, [plan.keys for plan in plans], [stage.keys for stage in stages]


def _global_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def _partials(rank: int, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What ``rank`` would hand back for these keys, float64."""
    whole = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
    return whole[keys]


def check_casts_and_reductions(group: dist.ProcessGroup, per_node: int) -> None:
    rank, ranks = group.rank(), group.size()
    for seed in range(2):
        plan, held, got = _problem(ranks, per_node, rank, seed)
        for hop in plan:
            verify_group_plan(hop, group)
        # several tensors of different dtypes and odd row sizes in one call, one of them not contiguous
        globals_ = [
            _global_rows(torch.bfloat16, (3,)),
            _global_rows(torch.float64, (2, 5)).transpose(1, 2),
            torch.arange(ROWS) % 2 == 0,
            _global_rows(torch.float32, ()),
        ]
        inputs = [x[held[rank]] for x in globals_]
        for rows, whole in zip(group_cast(inputs, plan, group), globals_, strict=True):
            assert torch.equal(rows, whole[got[rank]])
        work = group_cast(inputs, plan, group, async_op=True)
        work.advance()
        for rows, whole in zip(work.wait(), globals_, strict=True):
            assert torch.equal(rows, whole[got[rank]])
        for whole in globals_[:1]:
            (rows,) = group_cast([whole[held[rank]]], plan, group)
            assert torch.equal(rows, whole[got[rank]])

        # reductions
        copies = torch.zeros(ROWS)
        for keys in got:
            copies[keys] += 1
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            parts = [_partials(r, got[r], (2, 3)).to(dtype) for r in range(ranks)]
            expected = torch.zeros(ROWS, 2, 3, dtype=torch.float64)
            for r in range(ranks):
                expected[got[r]] += parts[r].double()
            for async_op in (False, True):
                result = group_reduce([parts[rank]] * 2, plan, group, async_op=async_op)
                result = result.wait() if async_op else result
                for total in result:
                    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                    tolerance = 1e-14 if dtype == torch.float64 else 1e-5
                    torch.testing.assert_close(total.double(), expected[held[rank]], rtol=tolerance, atol=tolerance)
                result = group_reduce([parts[rank]], plan, group, op="mean", async_op=async_op)
                (mean,) = result.wait() if async_op else result
                wanted = (expected / copies.clamp(min=1)[:, None, None])[held[rank]]
                torch.testing.assert_close(mean.double(), wanted, rtol=1e-5, atol=1e-5)

        outs = [_partials(r, got[r], (2, 3)) for r in range(ranks)]
        lses = [
            _partials(50 + r, got[r], (2,)).masked_fill(_partials(70 + r, got[r], (2,)) > 0.5, -math.inf)
            for r in range(ranks)
        ]
        outs = [o.masked_fill((s == -math.inf)[..., None], 0) for o, s in zip(outs, lses, strict=True)]
        weight, total = torch.zeros(ROWS, 2, dtype=torch.float64), torch.zeros(ROWS, 2, 3, dtype=torch.float64)
        for r in range(ranks):
            weight[got[r]] += torch.exp2(lses[r])
            total[got[r]] += torch.exp2(lses[r])[..., None] * outs[r]
        expected_out = torch.where(weight[..., None] > 0, total / weight[..., None], 0)
        for async_op in (False, True):
            result = group_reduce([outs[rank], lses[rank]], plan, group, op="lse", async_op=async_op)
            out, lse = result.wait() if async_op else result
            torch.testing.assert_close(out, expected_out[held[rank]])
            torch.testing.assert_close(lse, weight.log2()[held[rank]])

        # rows that arrive among others: each at its global index
        among = (*plan[:-1], plan[-1].among(got[rank], ROWS))
        for rows, whole in zip(group_cast(inputs, among, group), globals_, strict=True):
            there = torch.zeros(ROWS, dtype=torch.bool).index_fill_(0, got[rank], True)
            assert torch.equal(rows[there], whole[there]) and not rows[~there].any()
        (total,) = group_reduce([_partials(rank, torch.arange(ROWS), (3,))], among, group)
        (expected,) = group_reduce([_partials(rank, got[rank], (3,))], plan, group)
        assert torch.equal(total, expected)
        if len(got[rank]) < ROWS:
            with pytest.raises(ValueError, match="all arrive"):
                group_reduce([outs[rank].new_zeros(ROWS, 2, 3), lses[rank].new_zeros(ROWS, 2)], among, group, op="lse")


@pytest.mark.parametrize("ranks,per_node", [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 2)])
def test_casts_and_reductions(world: World, ranks: int, per_node: int) -> None:
    world.run(check_casts_and_reductions, ranks, per_node)


def check_two_level_traffic(group: dist.ProcessGroup, per_node: int) -> None:
    """A row crosses to a node once however many of its ranks want it; on the way back its copies cross as one sum."""
    rank, ranks = group.rank(), group.size()
    plan, held, got = _problem(ranks, per_node, rank)
    crossed: list[int] = []

    class Counting(RowExchange):
        def __init__(self, tensors: list[Tensor], index: Tensor, send_splits: list[int], *rest: Any) -> None:
            super().__init__(tensors, index, send_splits, *rest)
            elsewhere = torch.arange(ranks) // per_node != rank // per_node
            crossed.append(int(torch.tensor(send_splits)[elsewhere].sum()))

    with mock.patch.object(group_work, "RowExchange", Counting):
        (rows,) = group_cast([_global_rows(torch.float32, ())[held[rank]]], plan, group)
        sent = sum(crossed)
        group_reduce([rows], plan, group)
    totals = torch.tensor([sent, sum(crossed) - sent, len(got[rank])])
    dist.all_reduce(totals, group=group)
    unique = 0
    for first in range(0, ranks, per_node):
        members = range(first, first + per_node)
        wanted, own = (set(torch.cat([x[r] for r in members]).tolist()) for x in (got, held))
        unique += len(wanted - own)
    assert totals[:2].tolist() == [unique, unique] and unique < totals[2]


@pytest.mark.parametrize("ranks,per_node", [(4, 2), (6, 3)])
def test_two_level_traffic(world: World, ranks: int, per_node: int) -> None:
    world.run(check_two_level_traffic, ranks, per_node)


def check_gradients(group: dist.ProcessGroup, per_node: int) -> None:
    """The loss is a sum over all ranks; its gradient against central differences along a random direction."""
    rank, ranks = group.rank(), group.size()
    plan, held, got = _problem(ranks, per_node, rank)
    generator = torch.Generator().manual_seed(rank)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    own, copies = len(held[rank]), len(got[rank])
    weights = [rand(copies, 3), rand(copies), rand(own, 2, 3), rand(own, 2), rand(own, 3)]
    empty = rand(copies, 2) > 1

    def loss(x: Tensor, y: Tensor, out: Tensor, lse: Tensor, part: Tensor) -> Tensor:
        a, b = group_cast([x, y], plan, group)
        total = (a * weights[0]).sum() + (b.sin() * weights[1]).sum()
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -math.inf)
        joined, joined_lse = group_reduce([out, lse], plan, group, op="lse")
        seen = joined_lse > -math.inf
        total = total + (joined * weights[2]).sum() + (joined_lse * weights[3]).masked_fill(~seen, 0).sum()
        for op in ("sum", "mean"):
            (summed,) = group_reduce([part], plan, group, op=op)
            total = total + (summed.sin() * weights[4]).sum()
        return total

    leaves = [rand(own, 3), rand(own), rand(copies, 2, 3), rand(copies, 2), rand(copies, 3)]
    leaves = [x.requires_grad_() for x in leaves]
    grads = torch.autograd.grad(loss(*leaves), leaves)
    direction = [rand(*x.shape) for x in leaves]
    step = 1e-6
    with torch.no_grad():
        sides = [loss(*(x + s * step * d for x, d in zip(leaves, direction, strict=True))) for s in (1, -1)]
    numeric = (sides[0] - sides[1]) / (2 * step)
    exact = torch.stack([(g * d).sum() for g, d in zip(grads, direction, strict=True)]).sum()
    both = torch.stack((numeric, exact))
    dist.all_reduce(both, group=group)
    torch.testing.assert_close(both[0], both[1], rtol=1e-6, atol=1e-7)
    assert all(g.dtype == x.dtype for g, x in zip(grads, leaves, strict=True))


def check_compiled(group: dist.ProcessGroup) -> None:
    """In the graph without a break, forward and backward; another plan neither recompiles for contents nor, after the
    row counts have become dynamic, for sizes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    rank, ranks = group.rank(), group.size()

    def function(x: Tensor, plan: GroupPlan) -> Tensor:
        (rows,) = group_cast([x * 2], plan, group)
        (back,) = group_reduce([rows.sin()], plan, group)
        return back.cos()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for seed in range(6):
        (plan,), held, _ = _problem(ranks, 1, rank, seed)
        x = _global_rows(torch.float32, (8,))[held[rank]]
        a, b = (x.clone().requires_grad_() for _ in range(2))
        expected, actual = function(a, plan), compiled(b, plan)
        torch.testing.assert_close(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
        if seed == 2:
            frames = counter.frame_count
    assert counter.frame_count == frames <= 3, counter.frame_count


def check_compiled_without_rows(group: dist.ProcessGroup) -> None:
    """A rank that has no rows still takes part."""
    torch._dynamo.reset()
    dispatch = Dispatch.contiguous(2, [2, 0])
    plan = roll_plan(dispatch, group.rank(), 1)
    x = torch.arange(2.0 * (group.rank() == 0)).add(1).requires_grad_()
    out = torch.compile(lambda x: group_cast([x * 2], plan, group)[0] * 3, fullgraph=True)(x)
    out.sum().backward()
    torch.testing.assert_close(out, 6 * x.roll(1, 0))
    torch.testing.assert_close(x.grad, torch.full_like(x, 6))


def check_faults(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    plan = GroupPlan.from_splits([2], [[1 - rank]], [2], [1 - rank], 2)
    x = torch.zeros(2, 3)
    for call, message in (
        (lambda: group_cast([x[:1]], plan, group), r"tensors\[0\]: has shape \(1, 3\).*2 rows"),
        (lambda: group_cast([], plan, group), "give at least one"),
        (lambda: group_cast([x], GroupPlan.from_splits([2], [[0]], [], [], 3), group), "for 3 ranks.*has 2"),
        (lambda: group_cast([x.clone().requires_grad_()], plan, group, async_op=True), "without gradient"),
        (lambda: group_reduce([x], plan, group, op="max"), '"sum", "mean" and "lse"'),
        (lambda: group_reduce([x], plan, group, op="lse"), "out .* and lse"),
        (lambda: group_reduce([x.long()], plan, group), "floating point"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    wrong = GroupPlan.from_splits([2], [[1 - rank]], [2 + rank], [1 - rank], 2)
    with pytest.raises(ValueError, match="rank 0 sends 2 rows to rank 1, which expects 3"):
        verify_group_plan(wrong, group)


@pytest.mark.parametrize("ranks,per_node", [(3, 1), (4, 2)])
def test_gradients(world: World, ranks: int, per_node: int) -> None:
    world.run(check_gradients, ranks, per_node)


def test_compiled(world: World) -> None:
    world.run(check_compiled, 2)


def test_compiled_without_rows(world: World) -> None:
    world.run(check_compiled_without_rows, 2)


def test_faults(world: World) -> None:
    world.run(check_faults, 2)
