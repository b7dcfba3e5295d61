"""Moving queries instead of keys, for the pairs of ranks where that is cheaper.

Where few rows attend to many keys of another rank (cross-attention, decoding, many key heads), the rows go to the keys:
the holder computes their partial attention, and outputs come back to be joined by log-sum-exp.  The choice is made
for each pair (rank of the rows, rank of the keys), alike on every rank.

Shape legend: P ranks, N received rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import all_gather
from magi_flex.distributed.cost_model import Costs, Shape
from magi_flex.distributed.dispatch import Dispatch
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import KeyRanges, held_pieces, overlaps
from magi_flex.intervals import RowIntervals


@dataclass(frozen=True)
class PairCounts:
    """Of every (rank of the rows, rank of the keys), float64 ``[P, P]``.

    Attributes:
        rows: rows that attend to any of the keys.
        keys: keys that any of the rows attends to.
        area: attended pairs, mean over the mask's batch and heads.
    """

    rows: Tensor
    keys: Tensor
    area: Tensor


def pair_counts_of_rank(
    mask: RowIntervals, q_dispatch: Dispatch, kv_dispatch: Dispatch, rank: int, needed: KeyRanges
) -> Tensor:
    """Rows, keys and area of the rank's rows with each rank's keys, float64 ``[3, P]``."""
    counts = torch.zeros(3, q_dispatch.ranks, dtype=torch.float64)
    pieces = overlaps(needed, torch.tensor([rank]), held_pieces(kv_dispatch))
    counts[1].index_add_(0, pieces.owner, pieces.rows.double())
    own = mask.take_rows(q_dispatch.rows(rank).to(mask.starts.device))
    for owner in pieces.owner.unique().tolist():
        area_BHQ = own.take_keys(kv_dispatch.rows(owner).to(mask.starts.device)).row_area()
        counts[0, owner] = int((area_BHQ > 0).flatten(0, 1).any(0).sum())
        counts[2, owner] = float(area_BHQ.double().mean((0, 1)).sum())
    return counts


def gather_pair_counts(
    mask: RowIntervals, q_dispatch: Dispatch, kv_dispatch: Dispatch, needed: KeyRanges, group: dist.ProcessGroup
) -> PairCounts:
    """All ranks' counts.  A collective."""
    own = pair_counts_of_rank(mask, q_dispatch, kv_dispatch, group.rank(), needed)
    return PairCounts(*all_gather(own, group).unbind(1))


def choose_pairs(counts: PairCounts, shape: Shape, costs: Costs, backward: bool, bandwidth: float) -> Tensor:
    """For which pairs queries move, bool ``[P, P]``.

    Queries move where that takes fewer bytes, if the whole pass is then predicted to be faster: attention moves with
    them, which may unbalance the ranks.  Compute and communication overlap, so a pass takes the longer of the two.
    """
    remote = ~torch.eye(len(counts.rows), dtype=torch.bool)
    by_keys = counts.keys * (shape.key_bytes() + (shape.key_gradient_bytes() if backward else 0))
    by_rows = counts.rows * shape.query_bytes(backward)
    cheaper = (by_rows < by_keys) & remote
    if not cheaper.any():
        return cheaper
    rate = (costs.backward_flops if backward else costs.forward_flops) / shape.pair_flops(backward)

    def seconds(moved: Tensor) -> float:
        bytes_PP = torch.where(moved, by_rows, by_keys).masked_fill(~remote, 0)
        area = counts.area.masked_fill(moved, 0).sum(1) + counts.area.masked_fill(~moved, 0).sum(0)
        busiest = torch.maximum(bytes_PP.sum(0), bytes_PP.sum(1)).amax()
        return max(float(area.amax()) / rate, float(busiest) / bandwidth)

    none = torch.zeros_like(cheaper)
    return cheaper if seconds(cheaper) < seconds(none) else none


def without_pairs(needed: KeyRanges, kv_dispatch: Dispatch, moved: Tensor) -> KeyRanges:
    """The key ranges that are still needed where the queries of the pairs ``moved`` travel instead."""
    pieces = overlaps(needed, torch.arange(needed.units), held_pieces(kv_dispatch))
    pieces = pieces.select(~moved[pieces.unit, pieces.owner])
    return KeyRanges.union(needed.kv_len, needed.units, pieces.unit, pieces.begin, pieces.end)


@dataclass(frozen=True)
class QueryExchange:
    """One rank's part of moving queries.

    Attributes:
        hop: sends the rank's rows to the ranks that hold the keys; its output are the rows of others.
        rows: int64 ``[N]``, global indices of the received rows (a row of each sender once).
        mask: the received rows over the rank's own keys.
    """

    hop: GroupPlan
    rows: Tensor
    mask: RowIntervals


def build_query_exchange(
    mask: RowIntervals, q_dispatch: Dispatch, kv_dispatch: Dispatch, rank: int, moved: Tensor
) -> QueryExchange:
    """The part of ``rank`` where the queries of the pairs ``moved`` (bool ``[P, P]``) travel."""
    device = mask.starts.device

    def attending(of: int, keys_of: int) -> Tensor:
        """Which of the rows of one rank attend to the other's keys, as indices into its rows."""
        local = mask.take_rows(q_dispatch.rows(of).to(device)).take_keys(kv_dispatch.rows(keys_of).to(device))
        return (local.ends > local.starts).flatten(0, 2).any(0).nonzero()[:, 0].cpu()

    nothing = torch.zeros(0, dtype=torch.int64)
    ranks = q_dispatch.ranks
    sent = [attending(rank, other) if moved[rank, other] else nothing for other in range(ranks)]
    received = [q_dispatch.rows(o)[attending(o, rank)] if moved[o, rank] else nothing for o in range(ranks)]
    rows = torch.cat(received)
    hop = GroupPlan(
        len(q_dispatch.rows(rank)),
        len(rows),
        torch.cat(sent),
        torch.tensor([len(x) for x in sent]),
        torch.tensor([len(x) for x in received]),
        torch.arange(len(rows)),
    )
    over_own = mask.take_rows(rows.to(device)).take_keys(kv_dispatch.rows(rank).to(device))
    return QueryExchange(hop, rows, over_own)
