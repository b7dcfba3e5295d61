"""What the Hopper kernels share: rings of shared memory with their barriers, row tiles, and storing results.

A program has two warp groups that compute and a warp that loads.  The latter fills the slots of a ring by TMA: it waits
for a slot's ``free`` barrier, and the copy engine signals ``ready``; who computes waits for ``ready`` and arrives at
``free`` when the slot has been read.  Everybody counts the uses of a ring alike, as a slot and the parity of its
``ready`` phase; the phase of ``free`` that must have passed before has the other parity.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from magi_flex.kernels.triton_runs import read_record

GROUPS = gl.constexpr(2)  # warp groups that compute


@gluon.jit
def new_ring(desc, SLOTS: gl.constexpr):
    """Shared memory for SLOTS boxes of a tensor map."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """One barrier a slot, which ARRIVALS arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def next_slot(slot, parity, STAGES: gl.constexpr):
    """(slot, parity) of a ring's next use."""
    wraps = slot + 1 == STAGES
    return gl.where(wraps, 0, slot + 1), parity ^ wraps.to(gl.int32)


@gluon.jit
def slot_before(slot, uses, STAGES: gl.constexpr):
    """The slot used before ``slot``, or ``slot`` itself where ``uses``, how many there were, is 0."""
    return gl.where(uses == 0, slot, gl.where(slot == 0, STAGES - 1, slot - 1))


@gluon.jit
def turns_of(plan):
    """How many row tiles a program takes."""
    return gl.cdiv(plan[4], gl.num_programs(0))


@gluon.jit
def find_tile(turn, plan):
    """(first row, end, mask head, runs for triton_runs, steps, batch entry, head) of a program's tile number ``turn``.

    Work is dealt out longest first, every other turn the other way round, so that all get about the same.
    """
    records, partial_runs, full_runs, replicas, items, mask_batch, mask_heads, replica_heads = plan
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    wanted = item < items
    item = gl.where(wanted, item, 0)
    replica = item % replicas
    record = records + (item // replicas).to(gl.int64) * 8
    first, end, mask_head, partial_lo, full_lo, full_hi, steps = read_record(record)
    b = replica // replica_heads
    if mask_batch > 1:
        b = mask_head // mask_heads
    h = replica % replica_heads
    if mask_heads > 1:
        h = mask_head % mask_heads
    end = gl.where(wanted, end, first)
    return first, end, mask_head, (full_runs, full_lo, full_hi, partial_runs, partial_lo), steps, b, h


@gluon.jit
def store_rows(matrix, strides, b, h, value, first, end, COLS: gl.constexpr):
    """Stores ``value`` to rows ``first`` and on of a batch entry and head, as far as ``end`` and COLS columns."""
    ROWS: gl.constexpr = value.shape[0]
    WIDTH: gl.constexpr = value.shape[1]
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))[:, None]
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED))[None, :]
    base = matrix + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    value = gl.convert_layout(value.to(matrix.dtype.element_ty), STORED)
    gl.store(base + row.to(gl.int64) * strides[2] + col, value, mask=(row < end) & (col < COLS))
