"""What attention over many ranks would take: the real solvers on a real mask, and a model of kernels and links.

Ours comes from the same dispatch, needed key ranges and stage choice that a run uses; ring, Ulysses, their hybrid,
all-gather and stock context parallelism are computed beside it under the same figures.

Model.  A kernel computes whole blocks of keys for every row that attends to any of them; the backward pass shares
blocks and heads out as items, by the kernel's own estimate (cost_model.kernel_seconds); a launch comes on top.  A rank
moves bytes inside its node and over the network at the two bandwidths, both at the same time.  Exchanges synchronise: a
stage arrives when the rank with the most bytes is done.  The slowest rank counts.

Shape legend: P ranks, C chunks, M nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from magi_flex.distributed.cost_model import (
    MAX_STAGES,
    PREFETCH,
    Costs,
    Cut,
    Shape,
    kernel_seconds,
    least_cut,
    pass_seconds,
    pipeline,
)
from magi_flex.distributed.dispatch import (
    Dispatch,
    chunk_areas,
    dispatch_min_heap,
    even_row_counts,
    solve_dispatch,
)
from magi_flex.distributed.key_ranges import KeyRanges, held_pieces, needed_ranges, over_ranges, overlaps
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION, Span
from magi_flex.intervals import RowIntervals
from magi_flex.mask_outline import BLOCK, Outline, Spread

SAMPLED_RANKS = 8
STOCK_RATE = 0.65  # stock FlexAttention's kernels against ours on the same GPU (docs/design.md, measured baselines)


@dataclass(frozen=True)
class Cluster:
    """Ranks, and how they are joined."""

    ranks: int
    ranks_per_node: int = 8
    costs: Costs = Costs()

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ValueError(f"ranks, ranks_per_node: got {self.ranks}, {self.ranks_per_node}; allowed are 1 and more")
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ValueError(f"ranks: got {self.ranks}, which must be whole nodes of {self.ranks_per_node} ranks")

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.ranks_per_node)

    def seconds(self, node_bytes: float, network_bytes: float) -> float:
        """Time to move these bytes of one rank, inside its node and over the network."""
        return max(node_bytes / self.costs.node_bandwidth, network_bytes / self.costs.network_bandwidth)


@dataclass(frozen=True)
class Pass:
    """One scheme's prediction for one pass (forward or backward).

    Attributes:
        seconds: of the slowest rank; None where the scheme cannot run.
        tflops: 1e12 operations a second and rank, over attended pairs.
        imbalance: largest over mean area of the ranks.
        node_bytes, network_bytes: most bytes that a rank receives inside its node and from other nodes.
        total_network_bytes: over all ranks.
        stages: exchanges that compute hides.
        cut: of ours: "keys", where each brings some of the keys, or "heads", where each brings those of some heads.
        exposed: seconds in which the slowest rank computes nothing.
        why_not: why the scheme cannot run.
    """

    scheme: str
    direction: str
    seconds: float | None = None
    tflops: float | None = None
    imbalance: float | None = None
    node_bytes: float = 0.0
    network_bytes: float = 0.0
    total_network_bytes: float = 0.0
    stages: int = 1
    cut: str | None = None
    exposed: float = 0.0
    why_not: str | None = None
    timeline: list[Span] = field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, object]:
        out = asdict(self)
        out.pop("timeline")
        return out


class Simulation:
    """One mask on one cluster.

    Args:
        mask: queries and keys of one sequence (batch and heads of the mask count on average).
        shape: heads and dims of a rank's attention before any head is sharded.
    """

    def __init__(self, mask: RowIntervals, cluster: Cluster, shape: Shape):
        if mask.q_len != mask.kv_len:
            raise ValueError(f"mask: has {mask.q_len} x {mask.kv_len} rows x keys; self-attention is simulated")
        if mask.q_len < cluster.ranks:
            raise ValueError(f"mask: has {mask.q_len} rows for {cluster.ranks} ranks; give at least one row a rank")
        self.mask, self.cluster, self.shape = mask, cluster, shape
        self.area = float(chunk_areas(mask, BLOCK).sum())
        self.counts = even_row_counts(mask.q_len, cluster.ranks)

    def run(self, backward: bool = False) -> list[Pass]:
        """Every scheme, ours first."""
        schemes: list[tuple[str, Callable[[bool], Pass]]] = [
            ("magi_flex", self.ours),
            ("min-heap, flat", self.min_heap_flat),
            ("ring", self.ring),
            ("ulysses", self.ulysses),
            ("hybrid", self.hybrid),
            ("all-gather", self.all_gather),
            ("stock CP", self.stock),
        ]
        direction = "bwd" if backward else "fwd"
        return [replace(run(backward), scheme=name, direction=direction) for name, run in schemes]

    # ---- compute --------------------------------------------------------------------------------------------------

    def _finish(self, seconds: float, compute: float, backward: bool, **rest: object) -> Pass:
        flops = self.area * self.shape.pair_flops(backward)
        return Pass(
            "",
            "",
            seconds=seconds,
            tflops=flops / seconds / self.cluster.ranks / 1e12,
            exposed=max(0.0, seconds - compute),
            **rest,  # type: ignore[arg-type]
        )

    def _spreads(self, dispatch: Dispatch) -> tuple[list[Spread], float]:
        """How the rows of a few ranks are spread over the keys that they attend to, and the attended pairs of these
        ranks (mean over batch and heads)."""
        ranks = torch.linspace(0, dispatch.ranks - 1, min(SAMPLED_RANKS, dispatch.ranks)).long().unique().tolist()
        needed = needed_ranges(self.mask, dispatch, ranks)
        outlines = []
        for i, rank in enumerate(ranks):
            rows = self.mask.take_rows(dispatch.rows(rank))
            part = slice(int(needed.ptr[i]), int(needed.ptr[i + 1]))
            outlines.append(Outline.of(over_ranges(rows, needed.begin[part], needed.end[part])))
        return [x.spread() for x in outlines], sum(float(x.area_BH.double().mean()) for x in outlines)

    def _pair_seconds(self, spreads: tuple[list[Spread], float], backward: bool, head_groups: int = 1) -> float:
        """What an attended pair takes, without memory traffic."""
        of_ranks, area = spreads
        costs, shape = self.cluster.costs, self.shape
        return sum(kernel_seconds(costs, shape, backward, x, head_groups) for x in of_ranks) / area if area else 0.0

    def _plain_pair_seconds(self, backward: bool) -> float:
        """Of the sequence cut into equal parts."""
        return self._pair_seconds(self._spreads(Dispatch.contiguous(self.mask.q_len, self.counts)), backward)

    def _row_seconds(self, rows: float, backward: bool) -> float:
        return rows * self.shape.row_bytes(backward) / self.cluster.costs.memory_bandwidth

    # ---- ours -------------------------------------------------------------------------------------------------------

    def ours(self, backward: bool) -> Pass:
        dispatch = solve_dispatch([self.mask], self.counts)
        return self._exchange(dispatch, backward, two_level=self.cluster.nodes > 1, by_heads=True)

    def min_heap_flat(self, backward: bool) -> Pass:
        """Area-only dispatch in chunks of 512 and a flat exchange, as MagiAttention is set up."""
        chunk = max(1, min(512, self.mask.q_len // self.cluster.ranks // 4))
        dispatch = dispatch_min_heap(chunk_areas(self.mask, chunk), chunk, self.mask.q_len, self.counts)
        return self._exchange(dispatch, backward, two_level=False, by_heads=False)

    def _exchange(self, dispatch: Dispatch, backward: bool, two_level: bool, by_heads: bool) -> Pass:
        cluster, shape = self.cluster, self.shape
        needed = needed_ranges(self.mask, dispatch)
        rows = self._moved_rows(dispatch, needed, two_level)
        per_key = shape.key_bytes() + (shape.key_gradient_bytes() if backward else 0)
        node_bytes, network_bytes = rows.node * per_key, rows.network * per_key
        communication = cluster.seconds(float(node_bytes.amax()), float(network_bytes.amax()))
        load_P = dispatch.loads([self.mask])[0]
        remote_share_P = 1 - (self._local_areas(dispatch) / load_P.clamp(min=1)).clamp(max=1)
        spreads = self._spreads(dispatch)
        costs = cluster.costs
        cuts = [Cut("keys", 1)]
        if float(rows.total):
            cuts = [Cut("keys", n) for n in range(1, MAX_STAGES + 1)]
            cuts += [Cut("heads", n) for n in range(1, MAX_STAGES + 1) if by_heads and shape.kv_heads % n == 0]
        of_cuts = {}
        for cut in cuts:
            compute_P = (load_P * self._pair_seconds(spreads, backward, cut.head_groups)).tolist()
            seconds_P = [
                pass_seconds(cut, costs, shape, backward, own_rows, compute, remote_share, communication)
                for own_rows, compute, remote_share in zip(self.counts, compute_P, remote_share_P.tolist(), strict=True)
            ]
            slowest = max(range(len(seconds_P)), key=seconds_P.__getitem__)
            of_cuts[cut] = (seconds_P[slowest], slowest, compute_P[slowest])
        cut = least_cut(cuts, [seconds for seconds, *_ in of_cuts.values()])
        seconds, slowest, compute = of_cuts[cut]
        remote = compute if cut.by == "heads" else compute * float(remote_share_P[slowest])
        return self._finish(
            seconds,
            compute + self._row_seconds(self.counts[slowest], backward) + (cut.parts + 1) * costs.launch,
            backward,
            imbalance=float(load_P.amax() / load_P.mean()) if self.area else 1.0,
            node_bytes=float(node_bytes.amax()),
            network_bytes=float(network_bytes.amax()),
            total_network_bytes=float(network_bytes.sum()),
            stages=cut.parts,
            cut=cut.by,
            timeline=_timeline(compute - remote, remote, communication, cut, costs, backward),
        )

    def _local_areas(self, dispatch: Dispatch) -> Tensor:
        """Attended pairs of each rank's rows with its own keys, float64 ``[P]``."""
        heads = self.mask.starts.shape[0] * self.mask.starts.shape[1]
        areas = []
        for rank in range(dispatch.ranks):
            rows = dispatch.rows(rank)
            areas.append(self.mask.take_rows(rows).take_keys(rows).area() / heads)
        return torch.tensor(areas, dtype=torch.float64)

    def _moved_rows(self, dispatch: Dispatch, needed: KeyRanges, two_level: bool) -> _MovedRows:
        """Key rows that each rank receives (or sends, if more) inside its node and over the network."""
        per_node, nodes, ranks = self.cluster.ranks_per_node, self.cluster.nodes, self.cluster.ranks
        held = held_pieces(dispatch)
        node_of = torch.arange(ranks).div(per_node, rounding_mode="floor") if nodes > 1 else torch.zeros(ranks).long()
        inside_in, inside_out, cross_in, cross_out = torch.zeros(4, ranks, dtype=torch.float64)
        units = needed.grouped(per_node) if two_level else needed
        block = max(1, (1 << 22) // max(1, len(held.begin)))
        for first in range(0, ranks, block):  # inside the nodes (two levels), or everything (flat)
            pieces = overlaps(needed, torch.arange(first, min(first + block, ranks)), held)
            pieces = pieces.select(pieces.unit != pieces.owner)
            crosses = node_of[pieces.unit] != node_of[pieces.owner]
            rows = pieces.rows.double()
            if two_level:
                gateway = node_of[pieces.unit] * per_node + pieces.owner % per_node
                passed = gateway != pieces.unit
                inside_in.index_add_(0, pieces.unit[passed], rows[passed])
                inside_out.index_add_(0, gateway[passed], rows[passed])
                continue
            for mask, received, sent in ((~crosses, inside_in, inside_out), (crosses, cross_in, cross_out)):
                received.index_add_(0, pieces.unit[mask], rows[mask])
                sent.index_add_(0, pieces.owner[mask], rows[mask])
        if two_level:
            pieces = overlaps(units, torch.arange(nodes), held)
            pieces = pieces.select(pieces.unit != node_of[pieces.owner])
            rows = pieces.rows.double()
            cross_in.index_add_(0, pieces.unit * per_node + pieces.owner % per_node, rows)
            cross_out.index_add_(0, pieces.owner, rows)
        return _MovedRows(torch.maximum(inside_in, inside_out), torch.maximum(cross_in, cross_out))

    # ---- other schemes --------------------------------------------------------------------------------------------

    def _block_areas(self, parts: int) -> Tensor:
        """Attended pairs of each row chunk with each key chunk, float64 ``[C, C]``; C even chunks."""
        length = self.mask.q_len
        step = -(-length // parts)
        row_chunk = torch.arange(length).div(step, rounding_mode="floor")
        heads = self.mask.starts.shape[0] * self.mask.starts.shape[1]
        count, inside = torch.zeros(2, parts, parts + 1, dtype=torch.float64)
        for bound, sign in ((self.mask.ends, 1.0), (self.mask.starts, -1.0)):
            used = self.mask.ends > self.mask.starts
            key = bound[used].long()
            row = row_chunk.expand(used.shape)[used]
            cell = row * (parts + 1) + key.div(step, rounding_mode="floor")
            count.view(-1).index_add_(0, cell, torch.full(key.shape, sign, dtype=torch.float64))
            inside.view(-1).index_add_(0, cell, (key % step).double() * sign)
        after = count.sum(1, keepdim=True) - count.cumsum(1)
        return (inside + after * step)[:, :parts] / heads

    def _zigzag(self, parts: int) -> tuple[Tensor, Tensor]:
        """(area ``[P, P]`` of each rank's rows with each rank's keys, load ``[P]``): rank r holds chunks r and
        2P - 1 - r, which balances causal masks."""
        blocks = self._block_areas(2 * parts)
        rank = torch.cat((torch.arange(parts), torch.arange(parts).flip(0)))
        area = torch.zeros(parts, parts, dtype=torch.float64)
        area.view(-1).index_add_(0, (rank[:, None] * parts + rank).flatten(), blocks.flatten())
        return area, area.sum(1)

    def ring(self, backward: bool) -> Pass:
        return self._ring(self.cluster.ranks, 1, backward)

    def _ring(self, parts: int, heads_split: int, backward: bool) -> Pass:
        """Keys go around; step t waits for the slowest rank and for the keys of step t + 1."""
        cluster, shape, costs = self.cluster, self.shape, self.cluster.costs
        area_PP, load_P = self._zigzag(parts)
        rows = self.mask.q_len / parts
        seconds_PP = area_PP / heads_split * self._plain_pair_seconds(backward)
        seconds_PP += self._row_seconds(rows / heads_split, backward)
        per_key = (shape.key_bytes() + (shape.key_gradient_bytes() if backward else 0)) / heads_split
        crosses = cluster.nodes > 1
        move = rows * per_key / (costs.network_bandwidth if crosses else costs.node_bandwidth) + costs.latency
        rank = torch.arange(parts)
        seconds = 0.0
        for step in range(parts):
            compute = float(seconds_PP[rank, (rank - step) % parts].amax()) + costs.launch
            seconds += max(compute, move if step + 1 < parts else 0.0)
        moved = rows * per_key * (parts - 1)
        return self._finish(
            seconds,
            float(seconds_PP.sum(1).amax()),
            backward,
            imbalance=float(load_P.amax() / load_P.mean()) if self.area else 1.0,
            node_bytes=0.0 if crosses else moved,
            network_bytes=moved if crosses else 0.0,
            total_network_bytes=moved * heads_split * cluster.nodes if crosses else 0.0,
            stages=parts,
        )

    def ulysses(self, backward: bool) -> Pass:
        ranks, shape = self.cluster.ranks, self.shape
        if shape.kv_heads % ranks:
            why = f"{shape.kv_heads} key heads do not divide among {ranks} ranks"
            return Pass("", "", why_not=why)
        return self._with_head_exchange(ranks, Pass("", "", seconds=self._all_rows(ranks, backward)), backward)

    def _all_rows(self, heads_split: int, backward: bool) -> float:
        """Every row, the heads shared."""
        compute = self.area * self._plain_pair_seconds(backward) + self._row_seconds(self.mask.q_len, backward)
        return compute / heads_split + self.cluster.costs.launch

    def _with_head_exchange(self, split: int, inner: Pass, backward: bool) -> Pass:
        """Add the all-to-alls that give each of ``split`` ranks all rows for its heads; nothing hides them."""
        cluster, shape = self.cluster, self.shape
        rows = self.mask.q_len / cluster.ranks
        row_bytes = shape.key_bytes() + shape.batch * shape.element_size * shape.q_heads * (
            shape.head_dim + shape.v_head_dim
        )
        moved = rows * row_bytes * (2 if backward else 1) * (split - 1) / split
        across = moved * max(0, split - cluster.ranks_per_node) / split
        inside = moved - across
        assert inner.seconds is not None
        seconds = inner.seconds + cluster.seconds(inside, across) + 2 * cluster.costs.latency
        return self._finish(
            seconds,
            inner.seconds - inner.exposed,
            backward,
            imbalance=inner.imbalance or 1.0,
            node_bytes=inner.node_bytes + inside,
            network_bytes=inner.network_bytes + across,
            total_network_bytes=inner.total_network_bytes + across * cluster.ranks,
            stages=inner.stages,
        )

    def hybrid(self, backward: bool) -> Pass:
        """Ulysses inside the node, a ring between nodes (USP)."""
        cluster, shape = self.cluster, self.shape
        split = min(cluster.ranks, cluster.ranks_per_node)
        while shape.kv_heads % split or cluster.ranks % split:
            split -= 1
        if split == 1:
            return Pass("", "", why_not=f"{shape.kv_heads} key heads do not divide inside a node")
        ring = self._ring(cluster.ranks // split, split, backward)
        return self._with_head_exchange(split, ring, backward)

    def all_gather(self, backward: bool) -> Pass:
        """Keys of all ranks are gathered before anything is computed (and gradients scattered after)."""
        return self._gather(1.0, backward)

    def stock(self, backward: bool) -> Pass:
        """PyTorch's context parallel FlexAttention: all-gather, stock kernels."""
        return self._gather(STOCK_RATE, backward)

    def _gather(self, rate: float, backward: bool) -> Pass:
        """``rate``: of the kernels beside ours."""
        cluster, shape = self.cluster, self.shape
        _, load_P = self._zigzag(cluster.ranks)
        per_key = shape.key_bytes() + (shape.key_gradient_bytes() if backward else 0)
        rows = self.mask.q_len / cluster.ranks
        compute = float(load_P.amax()) * self._plain_pair_seconds(backward) + self._row_seconds(rows, backward)
        compute = compute / rate + cluster.costs.launch
        outside = cluster.ranks - min(cluster.ranks, cluster.ranks_per_node)
        inside_bytes = rows * (cluster.ranks - 1) * per_key
        network_bytes = rows * outside * per_key / min(cluster.ranks, cluster.ranks_per_node)
        moved = cluster.seconds(inside_bytes, network_bytes) + cluster.costs.latency if cluster.ranks > 1 else 0.0
        return self._finish(
            compute + moved,
            compute,
            backward,
            imbalance=float(load_P.amax() / load_P.mean()) if self.area else 1.0,
            node_bytes=inside_bytes,
            network_bytes=network_bytes,
            total_network_bytes=network_bytes * cluster.ranks,
        )


@dataclass(frozen=True)
class _MovedRows:
    """Rows of each rank, float64 ``[P]``: the larger of what it receives and what it sends."""

    node: Tensor
    network: Tensor

    @property
    def total(self) -> float:
        return float(self.node.sum() + self.network.sum())


def _timeline(local: float, remote: float, communication: float, cut: Cut, costs: Costs, backward: bool) -> list[Span]:
    """The slowest rank's spans, in microseconds."""
    if communication == 0:
        return [Span("local", COMPUTE, 0.0, (local + remote) * 1e6)]
    prefetch, part = (cut.parts, "heads") if cut.by == "heads" else (PREFETCH, "stage")
    spans = [] if cut.by == "heads" else [Span("local", COMPUTE, 0.0, (local + costs.launch) * 1e6)]
    returned = 0.0
    for i, stage in enumerate(pipeline(local, remote, communication, cut.parts, costs, prefetch)):
        spans.append(Span(f"keys of {part} {i}", NETWORK, stage.sent * 1e6, stage.arrived * 1e6))
        spans.append(Span(f"{part} {i}", COMPUTE, stage.begin * 1e6, stage.end * 1e6))
        if backward:
            sent = max(stage.end, returned)
            returned = sent + (stage.arrived - stage.sent) / 2
            spans.append(Span(f"gradients of {part} {i}", REDUCTION, sent * 1e6, returned * 1e6))
    return spans
