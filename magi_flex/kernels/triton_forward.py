"""The Triton forward kernel, and the kernel that merges the parts of rows whose keys were split.

A program walks the key runs of one row tile, see triton_runs.  Online softmax in base 2 (Milakov and Gimelshein, 2018;
FlashAttention-2, Dao, 2023).

Shape legend: M rows and N keys of a tile, D query/key head dim, E value head dim (both padded to powers of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from magi_flex.kernels.triton_mask import attends
from magi_flex.kernels.triton_runs import is_masked, next_step, read_record, run_bounds

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(base, row, stride, row_ok, col, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """Rows ``row`` ([M, 1] or [1, M]) and columns ``col`` (the other way round) of a matrix with unit column stride.

    What lies outside is 0 and not read: rows where not ``row_ok`` (if CHECK_ROWS), columns from COLS on.
    """
    at = base + row.to(tl.int64) * stride + col
    size: tl.constexpr = col.shape[0] * col.shape[1]
    if size == COLS:
        if CHECK_ROWS:
            tile = tl.load(at, mask=row_ok, other=0.0)
        else:
            tile = tl.load(at)
    else:
        if CHECK_ROWS:
            tile = tl.load(at, mask=row_ok & (col < COLS), other=0.0)
        else:
            tile = tl.load(at, mask=col < COLS, other=0.0)
    return tile


@triton.jit
def mod_index(table, index, index_ok):
    """The index that a score mod sees: that of ``table`` (None: the local one)."""
    if table is None:
        return index
    else:
        return tl.load(table + index, mask=index_ok, other=0)


# What changes from call to call: a kernel that knows more about it would be compiled again.
VARYING = [
    "score_args", "d_args", "d_captures", "row_tiles", "col_tiles", "head_tiles", "q_len", "rows", "splits",
    "heads", "group", "mask_batch", "mask_heads", "replica_heads", "records", "partial_runs", "full_runs",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, max_score,
    q_strides, k_strides, v_strides, out_strides, split_strides,
    mask, records, partial_runs, full_runs,
    score_args, index_maps,
    row_tiles, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: tl.constexpr, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr, POSITIVE_SCALE: tl.constexpr,
):  # fmt: skip
    """One row tile of one batch entry and head (of PACK heads that share a key head), or one split of its steps.

    Args:
        q_strides, ...: of batch, head, row; int64-safe.  out_strides belong to the partial output where SPLIT.
        split_strides: of ``out`` and of ``lse`` between splits.
        mask: see :func:`magi_flex.kernels.triton_mask.attends`.
        records, partial_runs, full_runs: see Schedule.
        index_maps: (b offset, h offset, q index or None, k index or None), see IndexMap.
        replica_heads: programs of a batch entry that share a mask head.
        SCORE: generated function of the score mod, or None.
        POSITIVE_SCALE: maxima may be taken before scaling.
    """
    tile = tl.program_id(0) % row_tiles
    replica = tl.program_id(0) // row_tiles
    first, end, mask_head, partial_lo, full_lo, full_hi, step_hi = read_record(records + tile.to(tl.int64) * 8)
    if first >= end:
        return
    runs = (full_runs, full_lo, full_hi, partial_runs, partial_lo)
    if mask_batch > 1:
        b = mask_head // mask_heads
    else:
        b = replica // replica_heads
    if mask_heads > 1:
        h_0 = mask_head % mask_heads
    else:
        h_0 = replica % replica_heads * PACK
    index = tl.arange(0, M)
    row = first + index // PACK
    row_ok = row < end
    if PACK == 1:
        h = h_0
        h_M1 = h_0
    else:
        h = h_0 + index % PACK
        h_M1 = h[:, None]
    g = h_0 // group

    step_lo = 0
    if SPLIT:
        steps = step_hi.to(tl.int64)
        step_lo = (steps * tl.program_id(1) // tl.num_programs(1)).to(tl.int32)
        step_hi = (steps * (tl.program_id(1) + 1) // tl.num_programs(1)).to(tl.int32)
    run = 0
    key, stop = run_bounds(runs, run, step_lo < step_hi)
    if SPLIT:
        skip = step_lo
        while skip * N >= stop - key and step_lo < step_hi:
            skip -= tl.cdiv(stop - key, N)
            run += 1
            key, stop = run_bounds(runs, run)
        key += skip * N

    d = tl.arange(0, D)
    e = tl.arange(0, E)
    q_base = q + b.to(tl.int64) * q_strides[0] + tl.cast(h_M1, tl.int64) * q_strides[1]
    q_MD = load_tile(q_base, row[:, None], q_strides[2], row_ok[:, None], d[None, :], HEAD_DIM, True)
    k_base = k + b.to(tl.int64) * k_strides[0] + g.to(tl.int64) * k_strides[1]
    v_base = v + b.to(tl.int64) * v_strides[0] + g.to(tl.int64) * v_strides[1]
    mod_b = b + index_maps[0]
    mod_h = h_M1 + index_maps[1]
    mod_q = mod_index(index_maps[2], row[:, None], row_ok[:, None])

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    # A factor that is not negative may be applied behind the maximum.
    if SCORE is None and POSITIVE_SCALE:
        to_base_2 = scale * LOG2_E
    else:
        to_base_2 = tl.full([], LOG2_E, tl.float32)
    for step in range(step_lo, step_hi):
        col = key + tl.arange(0, N)
        col_ok = col < stop
        k_DN = load_tile(k_base, col[None, :], k_strides[2], col_ok[None, :], d[:, None], HEAD_DIM, True)
        scores = tl.dot(q_MD, k_DN, input_precision="ieee")
        if SCORE is None:
            if not POSITIVE_SCALE:
                scores = scores * scale
        else:
            mod_k = mod_index(index_maps[3], col, col_ok)[None, :]
            scores = SCORE(scores * scale, mod_b, mod_h, mod_q, mod_k, score_args)
        if is_masked(runs, run, key, stop, N):
            seen = attends(
                mask, row[:, None], row_ok[:, None], first, col[None, :], key, mask_head, q_len, SLOTS, BIT_TILES
            )
            scores = tl.where(seen & col_ok[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * to_base_2)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        v_NE = load_tile(v_base, col[:, None], v_strides[2], col_ok[:, None], e[None, :], V_DIM, True)
        acc = tl.dot(weights.to(v_NE.dtype), v_NE, acc * fade[:, None], input_precision="ieee")
        top = new_top
        run, key, stop = next_step(runs, run, key, stop, step + 1 < step_hi, N)

    # No weight at all: an empty row.  (A NaN among the scores makes the total NaN, not 0.)
    empty = total == 0.0
    out_ME = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse_M = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    out_base = out + b.to(tl.int64) * out_strides[0] + tl.cast(h_M1, tl.int64) * out_strides[1]
    stat = (b.to(tl.int64) * heads + h) * q_len + row
    if SPLIT:
        out_base += tl.program_id(1).to(tl.int64) * split_strides[0]
        stat += tl.program_id(1).to(tl.int64) * split_strides[1]
    at = out_base + row[:, None].to(tl.int64) * out_strides[2] + e[None, :]
    tl.store(at, out_ME.to(out.dtype.element_ty), mask=row_ok[:, None] & (e[None, :] < V_DIM))
    tl.store(lse + stat, lse_M, mask=row_ok)
    tl.store(max_score + stat, top, mask=row_ok)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    parts, part_lse, part_max, out, lse, max_score, out_strides, splits, rows, q_len, heads,
    V_DIM: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Joins the splits of M rows, weighted by their LSEs.

    ``parts`` float32 [splits, rows, V_DIM] and the statistics [splits, rows] are contiguous; rows are numbered over
    batch entries, heads and queries.
    """
    index = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok = index < rows
    e = tl.arange(0, E)
    ok_ME = ok[:, None] & (e[None, :] < V_DIM)
    top = tl.full([M], float("-inf"), tl.float32)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    for split in range(splits):
        at = tl.cast(rows, tl.int64) * split + index
        part = tl.load(part_lse + at, mask=ok, other=float("-inf"))
        highest = tl.maximum(highest, tl.load(part_max + at, mask=ok, other=float("-inf")))
        new_top = tl.maximum(top, part)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part - shift)
        fade = tl.exp2(top - shift)
        total = total * fade + weight
        value = tl.load(parts + at[:, None] * V_DIM + e[None, :], mask=ok_ME, other=0.0)
        acc = acc * fade[:, None] + value * weight[:, None]
        top = new_top
    empty = total == 0.0
    row = index % q_len
    head = index // q_len
    at = out + (head // heads) * out_strides[0] + (head % heads) * out_strides[1] + row * out_strides[2]
    result = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    tl.store(at[:, None] + e[None, :], result.to(out.dtype.element_ty), mask=ok_ME)
    tl.store(lse + index, tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total))), mask=ok)
    tl.store(max_score + index, highest, mask=ok)
