"""What a pass costs: link and kernel figures, and the way to cut it that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from magi_flex.kernels.ffa_backward_schedule import KeyWork, least_item_steps
from magi_flex.mask_outline import BLOCK, Spread

MAX_STAGES = 8
PREFETCH = 2
# Of the backward kernel on Hopper: query rows of a step over a BLOCK of keys, and multiprocessors that share the items.
_STEP_ROWS, _PROCESSORS = 80, 132
_MARGIN = 0.01  # of a pass: less is no reason to cut it more often (measured passes vary by more)


class Cut(NamedTuple):
    """Into what a pass is cut, so that communication runs beside compute.

    Attributes:
        by: "keys": the rank's own keys, then ``parts`` sets of remote ones, whose partial results are joined
            (stages.py); "heads": ``parts`` groups of heads over all keys (head_groups.py).
        parts: how many.
    """

    by: Literal["keys", "heads"]
    parts: int

    @property
    def head_groups(self) -> int:
        return self.parts if self.by == "heads" else 1


@dataclass(frozen=True)
class Shape:
    """What the bytes and operations of a pass depend on.

    Attributes:
        batch, q_heads, kv_heads: per rank.
        head_dim, v_head_dim: of queries and keys, and of values.
        element_size: bytes of an element of q, k and v.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int = 1
    element_size: int = 2

    def key_bytes(self) -> int:
        """Bytes of one key with its value."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * self.element_size

    def key_gradient_bytes(self) -> int:
        """Bytes of the float32 gradient of one key with its value."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * 4

    def query_bytes(self, backward: bool) -> int:
        """Bytes of a query that goes to another rank's keys, and of what comes back.

        Forward: q, then out, lse and largest score in float32.  Backward: q, out, d_out, lse and d_lse, then dq in
        float32.
        """
        if backward:
            dims = (self.head_dim + 2 * self.v_head_dim) * self.element_size + 8 + 4 * self.head_dim
        else:
            dims = self.head_dim * self.element_size + 4 * self.v_head_dim + 8
        return self.batch * self.q_heads * dims

    def join_bytes(self, backward: bool, stages: int) -> int:
        """Bytes of memory traffic that a query costs more if its keys come in stages than if they come at once.

        Forward: its output is written in float32 and, in the end, read and rounded; each stage reads and writes it.
        Backward: the same with its gradient, and each stage zeroes, reads and writes a sum of its own, adds it to the
        total, and reads out and its gradient again.
        """
        if backward:
            return self.batch * self.q_heads * 4 * self.head_dim * (2 + 7 * stages)
        return self.batch * self.q_heads * 4 * self.v_head_dim * (2 + 2 * stages)

    def row_bytes(self, backward: bool) -> int:
        """Bytes of memory traffic of a query beside the products, however they are cut.

        Backward: out and its gradient are read, a float32 sum of its gradient is zeroed, read and rounded.
        """
        if not backward:
            return 0
        dims = self.element_size * (2 * self.v_head_dim + self.head_dim) + 8 * self.head_dim
        return self.batch * self.q_heads * dims

    def pair_flops(self, backward: bool) -> int:
        """Floating point operations of one (query, key) pair: 2 products forward, 5 backward."""
        if backward:
            return 2 * self.batch * self.q_heads * (3 * self.head_dim + 2 * self.v_head_dim)
        return 2 * self.batch * self.q_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class Costs:
    """Figures of a machine; defaults: H200s with NVLink, as measured on two of them (docs/design.md), and 400 Gb/s
    InfiniBand a GPU.

    Attributes:
        forward_flops, backward_flops: operations a second of the kernel on full tiles, where its multiprocessors are
            never idle.
        node_bandwidth, network_bandwidth: bytes a second that a rank sends (and receives) inside and between nodes.
        latency: seconds that a collective costs besides its bytes.
        launch: seconds that a kernel call costs besides its operations.
        part: seconds that cutting a pass into one part more costs besides: one exchange more to begin, and the small
            kernels around it.
        memory_bandwidth: bytes a second that a rank reads and writes in its own memory.
    """

    forward_flops: float = 700e12
    backward_flops: float = 600e12
    node_bandwidth: float = 260e9
    network_bandwidth: float = 40e9
    latency: float = 60e-6
    launch: float = 20e-6
    part: float = 250e-6
    memory_bandwidth: float = 4e12


@dataclass(frozen=True)
class StageTimes:
    """Seconds since the pass began: when a stage's keys leave and are here, and when its attention runs."""

    sent: float
    arrived: float
    begin: float
    end: float


def pipeline(
    local_compute: float,
    remote_compute: float,
    communication: float,
    stages: int,
    costs: Costs,
    prefetch: int = PREFETCH,
) -> list[StageTimes]:
    """Local attention, then ``stages`` equal remote parts; up to ``prefetch`` of them are on their way beside it.

    The keys of stage i leave when those of stage i - 1 are here and the attention of stage i - prefetch begins.
    """
    arrive = communication / stages + costs.latency
    compute = remote_compute / stages + costs.launch
    times: list[StageTimes] = []
    done = local_compute + costs.launch
    for i in range(stages):
        sent = times[-1].arrived if times else 0.0
        if i >= prefetch:
            sent = max(sent, times[i - prefetch].begin)
        begin = max(done, sent + arrive)
        done = begin + compute
        times.append(StageTimes(sent, sent + arrive, begin, done))
    return times


def kernel_seconds(costs: Costs, shape: Shape, backward: bool, spread: Spread, head_groups: int = 1) -> float:
    """What a rank's products take: every row that attends to a block of keys computes all of the block.

    The backward pass deals blocks of keys and heads to multiprocessors as items, by the kernel's own estimate
    (:func:`least_item_steps`); fewer heads in a call are fewer items.
    """
    if not spread.rows:
        return 0.0
    if not backward:
        return spread.rows / spread.masks * BLOCK * shape.pair_flops(False) / costs.forward_flops
    heads = shape.batch * shape.q_heads
    step = _STEP_ROWS * BLOCK * shape.pair_flops(True) / heads * _PROCESSORS / costs.backward_flops
    work = KeyWork(spread.blocks, spread.rows / _STEP_ROWS, spread.longest / _STEP_ROWS, spread.changes)
    copies = heads / (spread.masks * head_groups)
    return head_groups * step * least_item_steps(work, copies, shape.q_heads // shape.kv_heads, _PROCESSORS)


def pass_seconds(
    cut: Cut,
    costs: Costs,
    shape: Shape,
    backward: bool,
    rows: float,
    compute: float,
    remote_share: float,
    communication: float,
    prefetch: int = PREFETCH,
) -> float:
    """Of a rank with so many query rows, its products (:func:`kernel_seconds`) and the share of these that is with
    remote keys, and its bytes' time."""
    more = (cut.parts - 1) * costs.part + rows * shape.row_bytes(backward) / costs.memory_bandwidth
    if cut.by == "heads":
        return more + pipeline(0.0, compute, communication, cut.parts, costs, cut.parts)[-1].end
    remote = compute * remote_share
    end = more + pipeline(compute - remote, remote, communication, cut.parts, costs, prefetch)[-1].end
    return end + rows * shape.join_bytes(backward, cut.parts) / costs.memory_bandwidth


def choose_cut(
    costs: Costs,
    shape: Shape,
    backward: bool,
    spread: Spread,
    rows: float,
    own_keys: float,
    remote_keys: float,
    crosses_network: bool,
    prefetch: int = PREFETCH,
    by: Sequence[Literal["keys", "heads"]] = ("keys", "heads"),
    parts: int | None = None,
) -> Cut:
    """The cut into 1 to 8 parts with the shortest predicted pass, to the model's accuracy (:func:`least_cut`).

    Args:
        spread: of the rank with the most remote keys; its products are taken as spread evenly over its own and the
            remote keys.
        rows: query rows of a rank.
        own_keys, remote_keys: of that rank.
        by: what may be cut.
        parts: this many.

    Raises:
        ValueError: ``parts`` groups of heads are asked for and do not divide the key heads.
    """
    counts = range(1, MAX_STAGES + 1) if parts is None else [parts]
    cuts = [Cut("keys", n) for n in counts] if "keys" in by else []
    if "heads" in by:
        cuts += [Cut("heads", n) for n in counts if shape.kv_heads % n == 0]
    if not cuts:
        raise ValueError(
            f"forward_stages, backward_stages: {parts} groups of heads were asked for (cut={by[0]!r}), but the rank "
            f"has {shape.kv_heads} key heads; give a number that divides them"
        )
    if remote_keys == 0 and "keys" in by:
        return cuts[0]
    remote_share = remote_keys / max(1, own_keys + remote_keys)
    bytes_ = remote_keys * shape.key_bytes()
    if backward:
        bytes_ += remote_keys * shape.key_gradient_bytes()
    communication = bytes_ / (costs.network_bandwidth if crosses_network else costs.node_bandwidth)
    seconds = []
    for cut in cuts:
        compute = kernel_seconds(costs, shape, backward, spread, cut.head_groups)
        seconds.append(pass_seconds(cut, costs, shape, backward, rows, compute, remote_share, communication, prefetch))
    return least_cut(cuts, seconds)


def least_cut(cuts: Sequence[Cut], seconds: Sequence[float]) -> Cut:
    """The fastest of the cuts, or one of fewer parts that the model cannot tell from it."""
    alike = [(cut.parts, x, cut) for cut, x in zip(cuts, seconds, strict=True) if x <= min(seconds) * (1 + _MARGIN)]
    return min(alike)[2]
