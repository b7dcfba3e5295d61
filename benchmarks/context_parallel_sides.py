"""Ways to attend over a sequence that ranks share, for bench_context_parallel.py.

All take this rank's part of q, k, v as plain tensors and do one pass; a pass is a collective.  The all-gather and the
ring use the same dispatch of rows and the same kernels as staged attention, so they differ in communication alone.

Shape legend: B batch, H query heads, G key/value heads, Q local rows, K keys, D head dim, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_flex.distributed import ContextParallel
from magi_flex.distributed.attention_plan import KeySet
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.head_groups import GroupedAttention
from magi_flex.distributed.mask_forms import to_plan
from magi_flex.distributed.stages import StagedAttention
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionGradients, AttentionOutput, AttentionRequest
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_outline import Outline


@dataclass(frozen=True)
class Problem:
    """One mask and this rank's operands.

    Attributes:
        q, k, v, d_out: ``[B, H or G, Q, D]`` in dispatch order.
    """

    mesh: DeviceMesh
    mask: RowIntervals
    cp: ContextParallel
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor

    @property
    def group(self) -> dist.ProcessGroup:
        return self.cp.group

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


@dataclass(frozen=True)
class Side:
    """A way to do both passes.

    Attributes:
        forward: gives the output of this rank's rows.
        backward: gives dq, dk, dv of this rank's rows and keys; None: there is none on this machine.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, Tensor, Tensor]] | None


def _local_kernels(problem: Problem, keys: Tensor, wide: bool) -> Callable[[Tensor, Tensor], AttentionRequest]:
    """Requests of this rank's rows over these keys (global indices, ascending)."""
    rows = problem.mask.take_rows(problem.cp.rows).take_keys(keys)
    plan = to_plan(rows, Outline.of(rows))
    return lambda k, v: AttentionRequest(problem.q, k, v, plan, problem.scale, wide_results=wide, max_score=False)


def _forward(request: AttentionRequest, earlier: AttentionOutput | None = None) -> AttentionOutput:
    kernel = route(facts_of(request, True))
    return kernel.forward(request) if earlier is None else kernel.accumulate(request, earlier)


def _backward(request: AttentionRequest, out: AttentionOutput, d_out: Tensor) -> AttentionGradients:
    return route(facts_of(request, True)).backward(request, out.out.to(request.q.dtype), out.lse, d_out, None)


# ---- ours -----------------------------------------------------------------------------------------------------------


def _ours(
    problem: Problem,
    backward: bool,
    staged: type[StagedAttention] = StagedAttention,
    grouped: type[GroupedAttention] = GroupedAttention,
) -> StagedAttention | GroupedAttention:
    q, k, v = problem.tensors
    mask = problem.cp.masks[0]
    shape = Shape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[0], q.element_size())
    plan = mask.plan(shape, backward)
    kind = staged if plan.joined is None else grouped
    common = {"timeline": mask.timeline, "prefetch": mask.options.prefetch, "max_score": False}
    return kind(plan, problem.group, problem.scale, **common)


def ours(problem: Problem) -> Side:
    """As flex_attention on a ContextParallel's DTensors computes it."""
    return _side(problem, _ours(problem, False), _ours(problem, True))


def _side(
    problem: Problem, forward: StagedAttention | GroupedAttention, backward: StagedAttention | GroupedAttention
) -> Side:
    q, k, v = problem.tensors
    result, _ = forward.forward(q, k, v)
    return Side(
        lambda: forward.forward(q, k, v)[0].out,
        lambda: _of(backward.backward(q, k, v, result.out, result.lse, problem.d_out, None)),
    )


def _of(grads: AttentionGradients) -> tuple[Tensor, Tensor, Tensor]:
    return grads.dq, grads.dk, grads.dv


class _StillStages(StagedAttention):
    """The keys are there already, and gradients stay: what is computed, and nothing else."""

    def _key_sets(self, k: Tensor, v: Tensor, kept: object) -> Iterator[tuple[KeySet, Tensor, Tensor]]:
        local, *remote = self.plan.sets
        yield local, k, v
        for key_set in remote:
            yield key_set, *_rows_like(k, v, len(key_set.keys))

    def _reduce(self, *args: object) -> Callable[[], list[Tensor]]:
        return list


class _StillGroups(GroupedAttention):
    def _groups(self, q_heads: int, k: Tensor, v: Tensor, kept: object) -> Iterator[tuple[Any, Tensor, Tensor]]:
        for group in self._cut(q_heads, k.shape[1]):
            yield group, *_rows_like(k[:, group.key], v[:, group.key], len(self._joined.keys))

    def _reduce(self, lane: object, parts: list[Tensor], group: object) -> Callable[[], list[Tensor]]:
        return lambda: [x[: len(self.plan.keys)] for x in parts]


def _rows_like(k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many random keys and values, as they lie after they have travelled."""
    k, v = (_random_rows((count, *x.shape[:2], x.shape[3]), x.dtype, x.device).movedim(0, 2) for x in (k, v))
    return k, v


@functools.lru_cache(maxsize=8)
def _random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def computing_only(problem: Problem) -> Side:
    """The kernel calls of :func:`ours` alone: its time beside that of ours is the exposed communication."""
    return _side(problem, *(_ours(problem, x, _StillStages, _StillGroups) for x in (False, True)))


# ---- all-gather with our kernels ------------------------------------------------------------------------------------


def all_gather(problem: Problem) -> Side:
    """All keys and values everywhere, then one kernel; dK and dV of all keys are scattered back as sums."""
    counts, ranks, rank = problem.cp.dispatch.row_counts(), problem.group.size(), problem.group.rank()
    most = max(counts)
    # rank by rank as gathered -> in the order of the sequence
    place = torch.cat([torch.arange(n) + i * most for i, n in enumerate(counts)]).to(problem.q.device)
    order = place[torch.argsort(problem.cp.dispatch.order(problem.q.device))]
    request = _local_kernels(problem, torch.arange(problem.mask.kv_len, device=problem.q.device), False)

    def gathered() -> tuple[Tensor, Tensor]:
        own = torch.stack((problem.k, problem.v)).movedim(3, 0)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        whole = padded.new_empty(ranks * most, *own.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=problem.group)
        k, v = whole.index_select(0, order).movedim(0, 3)
        return k, v

    def forward() -> AttentionOutput:
        return _forward(request(*gathered()))

    result = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        grads = _backward(request(*gathered()), result, problem.d_out)
        both = torch.stack((grads.dk, grads.dv)).movedim(3, 0).float()
        sent = both.new_zeros(ranks * most, *both.shape[1:]).index_copy_(0, order, both)
        if dist.get_backend(problem.group) == "gloo":
            dist.all_reduce(sent, group=problem.group)
            own = sent[rank * most : (rank + 1) * most]
        else:
            own = sent.new_empty(most, *sent.shape[1:])
            dist.reduce_scatter_tensor(own, sent, group=problem.group)
        dk, dv = own[: counts[rank]].movedim(0, 3).to(problem.k.dtype)
        return grads.dq, dk, dv

    return Side(lambda: forward().out, backward)


# ---- a ring ---------------------------------------------------------------------------------------------------------


class _Ring:
    """Sends to the next rank and receives from the one before, beside what is computed meanwhile."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        ranks = dist.get_process_group_ranks(group)
        self.next = ranks[(group.rank() + 1) % len(ranks)]
        self.previous = ranks[(group.rank() - 1) % len(ranks)]

    def pass_on(self, sent: Tensor, received: Tensor) -> Callable[[], Tensor]:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self.next, self.group),
                dist.P2POp(dist.irecv, received, self.previous, self.group),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait


def ring(problem: Problem) -> Side:
    """Ring attention (Liu et al. 2023): blocks of keys go round, in the backward pass with their gradients."""
    counts, ranks, rank = problem.cp.dispatch.row_counts(), problem.group.size(), problem.group.rank()
    sources = [(rank - i) % ranks for i in range(ranks)]
    device = problem.q.device
    requests, empty = [], []
    for source in sources:
        keys = problem.cp.dispatch.rows(source).to(device)
        empty.append(problem.mask.take_rows(problem.cp.rows).take_keys(keys).area() == 0)
        requests.append(_local_kernels(problem, keys, True))
    passing, returning = _Ring(problem.group), _Ring(problem.group)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        block = torch.stack((problem.k, problem.v))
        for i in range(ranks):
            arriving = None
            if i + 1 < ranks:
                size = (*block.shape[:3], counts[sources[i + 1]], block.shape[4])
                arriving = passing.pass_on(block, block.new_empty(size))
            yield i, block
            if arriving is not None:
                block = arriving()

    def forward() -> AttentionOutput:
        lse = problem.q.new_full(problem.q.shape[:3], -torch.inf, dtype=torch.float32)
        total = AttentionOutput(torch.zeros_like(problem.d_out, dtype=torch.float32), lse, lse.clone())
        for i, (k, v) in blocks():
            if not empty[i]:
                total = _forward(requests[i](k, v), total)
        return total

    result = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros_like(problem.q, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for i, (k, v) in blocks():
            own = torch.zeros((2, *k.shape), dtype=torch.float32, device=device)
            if not empty[i]:
                grads = _backward(requests[i](k, v), result, problem.d_out)
                dq += grads.dq
                own = torch.stack((grads.dk, grads.dv))
            if arriving is not None:
                own += arriving()
            size = (*own.shape[:3], counts[(sources[i] - 1) % ranks], own.shape[4])
            arriving = returning.pass_on(own, own.new_empty(size))
        assert arriving is not None
        dk, dv = arriving().to(problem.k.dtype)
        return dq.to(problem.q.dtype), dk, dv

    return Side(lambda: forward().out, backward)


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


def stock(problem: Problem, mask: str) -> Side:
    """``_ContextParallel`` (all-gather) with stock compiled flex_attention and head-tail balancing.

    The BlockMask is made uncompiled: compiling its mask builder took minutes at 16K tokens.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as stock_cp
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    starts, ends = (x[0, 0, 0] for x in (problem.mask.starts, problem.mask.ends))
    mask_mods = {
        "full": lambda b, h, q, k: k >= 0,
        "causal": lambda b, h, q, k: q >= k,
    }
    mask_mod = mask_mods.get(mask, lambda b, h, q, k: (k >= starts[q]) & (k < ends[q]))
    ranks, length, device = problem.group.size(), problem.mask.q_len, problem.q.device
    balancer = _HeadTailLoadBalancer(length, ranks, device.type)
    stock_cp._compiled_create_block_mask = create_block_mask
    block_mask = stock_cp._create_cp_block_mask(mask_mod, 1, 1, length, length, problem.mesh, balancer)
    rows = balancer._generate_indices(restore=False)[0].chunk(ranks)[problem.group.rank()].to(device)
    whole = [problem.cp.unshard(x, 2) for x in (*problem.tensors, problem.d_out)]
    q, k, v, d_out = (x.index_select(2, rows) for x in whole)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # masks of earlier cells count towards it all the same
    compiled = torch.compile(flex_attention, dynamic=False)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=block_mask, enable_gqa=True)

    module = Attention()
    kind = stock_cp._ContextParallel.AttentionType.FLEX
    stock_cp._ContextParallel(2, kind)._apply(module, problem.mesh)
    if device.type == "cpu":
        return Side(lambda: module(q, k, v), None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = module(*leaves)
    return Side(
        lambda: module(q, k, v),
        lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
    )
