"""Exchange plan: how the keys that a rank's rows attend to get there, each once, and the mask of what is there.

The plan of one mask follows from the needed key ranges of all ranks and from who holds which keys; every rank derives
its own part from the same input, so that nothing but these ranges is ever exchanged.

Two levels: ranks ``[n * ranks_per_node, (n + 1) * ranks_per_node)`` form node n.  A key that a node needs crosses the
network once, to the rank of that node with the holder's local index, which passes it on to the ranks that need it.

Shape legend: Q local rows, K keys of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.distributed.dispatch import Dispatch, expand_ranges
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import KeyRanges, Pieces, held_pieces, overlaps, split_stages
from magi_flex.distributed.query_exchange import QueryExchange, build_query_exchange, without_pairs
from magi_flex.intervals import RowIntervals


@dataclass(frozen=True)
class RemoteStage:
    """Keys that arrive together.

    Attributes:
        hops: one GroupPlan (flat), or two: between nodes, then inside the node.  The input of the second hop is the
            rank's own keys followed by what the first one brought.
        keys: int64 ``[K]``, their global indices, ascending: the order of the last hop's output.
        mask: the local rows over these keys.
        own: int64, where the rank's own keys stand among ``keys``; None: these are the keys of others alone.
    """

    hops: tuple[GroupPlan, ...]
    keys: Tensor
    mask: RowIntervals
    own: Tensor | None = None


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part of attention under one mask.

    Attributes:
        rank: this rank.
        rows, keys: int64, global indices of the query rows and keys that the rank holds, ascending.
        mask: the local rows over the rank's own keys; None where these are ``joined`` to the others.
        stages: the remote keys; every rank has the same number of stages.
        queries: rows that travel to the ranks that hold their keys, where any do.
    """

    rank: int
    rows: Tensor
    keys: Tensor
    mask: RowIntervals | None
    stages: tuple[RemoteStage, ...]
    queries: QueryExchange | None = None

    @property
    def joined(self) -> RemoteStage | None:
        """The only stage, if it holds the rank's own keys as well."""
        return self.stages[0] if self.stages and self.stages[0].own is not None else None

    @property
    def nbytes(self) -> int:
        total = self.rows.nbytes + self.keys.nbytes + (0 if self.mask is None else self.mask.nbytes)
        for stage in self.stages:
            total += stage.keys.nbytes + stage.mask.nbytes + sum(hop.nbytes for hop in stage.hops)
            total += 0 if stage.own is None else stage.own.nbytes
        return total


def build_exchange_plan(
    mask: RowIntervals,
    q_dispatch: Dispatch,
    kv_dispatch: Dispatch,
    rank: int,
    needed: KeyRanges,
    stages: int = 1,
    ranks_per_node: int = 1,
    moved: Tensor | None = None,
    joined: bool = False,
) -> ExchangePlan:
    """The part of ``rank``.

    Args:
        mask: of the whole problem.
        q_dispatch, kv_dispatch: who holds the query rows and the keys (the same object in self-attention).
        needed: the keys that each rank's rows attend to (:func:`key_ranges.needed_ranges`), the same on every rank.
        stages: how many parts the remote keys arrive in.
        ranks_per_node: above 1 (and below the number of ranks): two levels.
        moved: bool ``[P, P]``, pairs (rank of the rows, rank of the keys) for which queries travel instead of keys.
        joined: one stage, which holds the rank's own keys as well; queries do not travel.

    Raises:
        ValueError: lengths or rank counts that do not agree, a stage count below 1, ranks that do not fill the nodes,
            ``joined`` with several stages or travelling queries.
    """
    _check(mask, q_dispatch, kv_dispatch, needed, stages, ranks_per_node)
    if joined and (stages != 1 or moved is not None):
        raise ValueError(f"joined: allowed with one stage and without moved queries only, not with {stages} stages")
    held = held_pieces(kv_dispatch)
    queries = None
    if moved is not None and moved.any():
        needed = without_pairs(needed, kv_dispatch, moved)
        queries = build_query_exchange(mask, q_dispatch, kv_dispatch, rank, moved)
    rows, keys = q_dispatch.rows(rank), kv_dispatch.rows(rank)
    local_rows = mask.take_rows(rows.to(mask.starts.device))
    if 1 < ranks_per_node < q_dispatch.ranks:
        hops = _two_level_hops(needed, held, len(keys), rank, stages, ranks_per_node)
    else:
        hops = _flat_hops(needed, held, len(keys), rank, stages)

    def over(some: Tensor) -> RowIntervals:
        return local_rows.take_keys(some.to(mask.starts.device))

    if joined:
        (*first, last), remote_keys = hops[0]
        every, order = torch.sort(torch.cat((keys, remote_keys)))
        own, arriving = torch.argsort(order).split((len(keys), len(remote_keys)))
        stage = RemoteStage((*first, last.among(arriving, len(every))), every, over(every), own)
        return ExchangePlan(rank, rows, keys, None, (stage,))
    remote = [RemoteStage(stage_hops, stage_keys, over(stage_keys)) for stage_hops, stage_keys in hops]
    return ExchangePlan(rank, rows, keys, over(keys), tuple(remote), queries)


def _check(
    mask: RowIntervals, q_dispatch: Dispatch, kv_dispatch: Dispatch, needed: KeyRanges, stages: int, ranks_per_node: int
) -> None:
    if (q_dispatch.length, kv_dispatch.length) != (mask.q_len, mask.kv_len):
        raise ValueError(
            f"q_dispatch, kv_dispatch: for {q_dispatch.length} x {kv_dispatch.length} rows x keys, but the mask has "
            f"{mask.q_len} x {mask.kv_len}"
        )
    if not q_dispatch.ranks == kv_dispatch.ranks == needed.units:
        raise ValueError(
            f"q_dispatch, kv_dispatch, needed: for {q_dispatch.ranks}, {kv_dispatch.ranks} and {needed.units} ranks; "
            "the three must agree"
        )
    if stages < 1:
        raise ValueError(f"stages: got {stages}, allowed are 1 and more")
    if ranks_per_node < 1 or q_dispatch.ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node: got {ranks_per_node}, which must divide the {q_dispatch.ranks} ranks")


Hops = list[tuple[tuple[GroupPlan, ...], Tensor]]


def _flat_hops(needed: KeyRanges, held: Pieces, own_keys: int, rank: int, stages: int) -> Hops:
    """(hops, keys) of each stage."""
    ranks = needed.units
    receive = _without_owner(overlaps(needed, torch.tensor([rank]), held), rank)
    others = torch.arange(ranks)
    send = overlaps(needed, others[others != rank], held.select(held.owner == rank))
    receive, send = split_stages(receive, stages), split_stages(send, stages)
    out: Hops = []
    for stage in range(stages):
        arriving, leaving = receive.select(receive.stage == stage), send.select(send.stage == stage)
        keys, slot = _arrange(arriving)
        hop = _group_plan(
            own_keys, len(keys), leaving, leaving.unit, leaving.offset, arriving, arriving.owner, slot, ranks
        )
        out.append(((hop,), keys))
    return out


def _two_level_hops(
    needed: KeyRanges, held: Pieces, own_keys: int, rank: int, stages: int, ranks_per_node: int
) -> Hops:
    ranks = needed.units
    node, local = divmod(rank, ranks_per_node)
    by_node = needed.grouped(ranks_per_node)
    nodes = torch.arange(by_node.units)
    # Who holds what this node needs; the stage of a key is decided here, so that it crosses in one stage only.
    table = split_stages(overlaps(by_node, torch.tensor([node]), held), stages)
    table = table.select(torch.argsort(table.begin))
    send = split_stages(overlaps(by_node, nodes[nodes != node], held.select(held.owner == rank)), stages)
    members = node * ranks_per_node + torch.arange(ranks_per_node)
    gateway = node * ranks_per_node + table.owner % ranks_per_node
    inside = table.owner.div(ranks_per_node, rounding_mode="floor") == node
    out: Hops = []
    for stage in range(stages):
        here = table.stage == stage
        arriving, leaving = table.select(here & ~inside & (gateway == rank)), send.select(send.stage == stage)
        order = torch.argsort(arriving.owner, stable=True)
        arriving = arriving.select(order)
        keys, slot = _arrange(arriving)
        destination = leaving.unit * ranks_per_node + local
        between = _group_plan(
            own_keys, len(keys), leaving, destination, leaving.offset, arriving, arriving.owner, slot, ranks
        )
        # What this rank passes on inside the node: its own keys, and what just arrived (after them).
        own = table.select(here & (table.owner == rank))
        hold = Pieces(*(torch.cat(pair) for pair in zip(own.columns(), arriving.columns(), strict=True)))
        hold = Pieces(hold.unit, hold.owner, hold.begin, hold.end, torch.cat((own.offset, own_keys + slot)), hold.stage)
        passing = overlaps(needed, members, hold)
        passing = passing.select(passing.unit != passing.owner)
        passing = passing.select(torch.argsort(passing.begin))
        passing = passing.select(torch.argsort(passing.unit, stable=True))
        final = _without_owner(overlaps(needed, torch.tensor([rank]), table.select(here)), rank)
        source = node * ranks_per_node + final.owner % ranks_per_node
        order = torch.argsort(source, stable=True)
        final, source = final.select(order), source[order]
        final_keys, slot = _arrange(final)
        within = _group_plan(
            own_keys + len(keys), len(final_keys), passing, passing.unit, passing.offset, final, source, slot, ranks
        )
        out.append(((between, within), final_keys))
    return out


def _without_owner(pieces: Pieces, rank: int) -> Pieces:
    return pieces.select(pieces.owner != rank)


def _arrange(pieces: Pieces) -> tuple[Tensor, Tensor]:
    """All keys of the pieces, ascending, and the position of each piece's first key among them."""
    order = torch.argsort(pieces.begin)
    rows = pieces.rows[order]
    slot = torch.empty_like(rows)
    slot[order] = rows.cumsum(0) - rows
    return expand_ranges(pieces.begin[order], pieces.end[order]), slot


def _group_plan(
    in_rows: int,
    out_rows: int,
    leaving: Pieces,
    destination: Tensor,
    offset: Tensor,
    arriving: Pieces,
    source: Tensor,
    slot: Tensor,
    ranks: int,
) -> GroupPlan:
    return GroupPlan.from_blocks(
        in_rows,
        out_rows,
        torch.stack((destination, offset, offset + leaving.rows), 1),
        torch.stack((source, slot, slot + arriving.rows), 1),
        ranks,
    )
