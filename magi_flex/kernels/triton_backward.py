"""The Triton backward kernels: the scores of a tile are computed again from q, k and the saved LSE.

``kv_kernel`` keeps a tile of keys and walks the query runs of the transposed plan, for all query heads of its key head;
``q_kernel`` keeps a tile of queries and walks the key runs of the forward plan.  Nobody adds to another program's
results, so gradients of q, k and v are the same bit for bit in every run.  (FlashAttention-2, Dao, 2023, has the
formulas; PyTorch's FlexAttention splits the work in the same two ways.)

Shape legend: M queries and N keys of a tile, D query/key head dim, E value head dim (both padded to powers of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from magi_flex.kernels.triton_forward import LOG2_E, VARYING, load_tile, mod_index
from magi_flex.kernels.triton_mask import attends
from magi_flex.kernels.triton_runs import is_masked, next_step, read_record, run_bounds


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    out, d_out, lse, d_lse, delta, kept_lse, out_strides, d_out_strides, lse_strides, d_lse_strides, rows, q_len, heads,
    V_DIM: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * d_out) - d_lse * log2(e) for each row, and the LSE again, contiguous.

    Empty rows have delta 0, whatever their d_lse holds, and LSE inf, so that they get no weights.
    """
    index = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok = index < rows
    e = tl.arange(0, E)
    ok_ME = ok[:, None] & (e[None, :] < V_DIM)
    row = index % q_len
    b = index // q_len // heads
    h = index // q_len % heads
    at = b * out_strides[0] + h * out_strides[1] + row * out_strides[2]
    out_ME = tl.load(out + at[:, None] + e[None, :], mask=ok_ME, other=0.0).to(tl.float32)
    at = b * d_out_strides[0] + h * d_out_strides[1] + row * d_out_strides[2]
    d_out_ME = tl.load(d_out + at[:, None] + e[None, :], mask=ok_ME, other=0.0).to(tl.float32)
    delta_M = tl.sum(out_ME * d_out_ME, 1)
    if d_lse is not None:
        at = b * d_lse_strides[0] + h * d_lse_strides[1] + row * d_lse_strides[2]
        delta_M -= tl.load(d_lse + at, mask=ok, other=0.0).to(tl.float32) * LOG2_E
    at = b * lse_strides[0] + h * lse_strides[1] + row * lse_strides[2]
    lse_M = tl.load(lse + at, mask=ok, other=float("-inf"))
    empty = lse_M == float("-inf")
    tl.store(delta + index, tl.where(empty, 0.0, delta_M), mask=ok)
    tl.store(kept_lse + index, tl.where(empty, float("inf"), lse_M), mask=ok)


@triton.jit(do_not_specialize=VARYING)
def kv_kernel(
    q, k, v, d_out, lse, delta, dk, dv,
    q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides,
    mask, records, partial_runs, full_runs, score_args, d_args, index_maps,
    col_tiles, head_tiles, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one batch entry and key head.

    Args:
        lse, delta: float32 [B, H, q_len], contiguous.
        col_tiles: programs of a replica.
        head_tiles: 0 where the heads of a group share their tiles and runs; else records of a mask head, which are
            aligned, so that record i of every head is for the same keys.
        replica_heads: key heads (query heads, if only those differ) that share a mask head.
        Others as in the forward kernel; D_SCORE: generated function of the score's gradient, or None.
    """
    tile = (tl.program_id(0) % col_tiles).to(tl.int64)
    replica = tl.program_id(0) // col_tiles
    if head_tiles > 0:
        tile = tile // head_tiles * group * head_tiles + tile % head_tiles
    record = records + tile * 8
    first, end, mask_head, partial_lo, full_lo, full_hi, steps = read_record(record)
    if first >= end:
        return
    if mask_batch > 1:
        b = mask_head // mask_heads
    else:
        b = replica // replica_heads
    if mask_heads > 1:
        g = mask_head % mask_heads // group
    else:
        g = replica % replica_heads

    d = tl.arange(0, D)
    e = tl.arange(0, E)
    col = first + tl.arange(0, N)
    col_ok = col < end
    k_base = k + b.to(tl.int64) * k_strides[0] + g.to(tl.int64) * k_strides[1]
    v_base = v + b.to(tl.int64) * v_strides[0] + g.to(tl.int64) * v_strides[1]
    k_ND = load_tile(k_base, col[:, None], k_strides[2], col_ok[:, None], d[None, :], HEAD_DIM, True)
    v_NE = load_tile(v_base, col[:, None], v_strides[2], col_ok[:, None], e[None, :], V_DIM, True)
    mod_k = mod_index(index_maps[3], col, col_ok)[:, None]
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_NE = tl.zeros([N, E], tl.float32)
    for member in range(group):
        h = g * group + member
        q_base = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
        d_out_base = d_out + b.to(tl.int64) * d_out_strides[0] + h.to(tl.int64) * d_out_strides[1]
        stat = (b.to(tl.int64) * heads + h) * q_len
        if head_tiles > 0:
            own = record + tl.cast(head_tiles, tl.int64) * 8 * member
            _, _, mask_head, partial_lo, full_lo, full_hi, steps = read_record(own)
        runs = (full_runs, full_lo, full_hi, partial_runs, partial_lo)
        run = 0
        row_0, stop = run_bounds(runs, run, steps > 0)
        for step in range(steps):  # tiles are transposed: [keys, queries]
            row = row_0 + tl.arange(0, M)
            row_ok = row < stop
            masked = is_masked(runs, run, row_0, stop, M)
            q_MD = load_tile(q_base, row[:, None], q_strides[2], row_ok[:, None], d[None, :], HEAD_DIM, True)
            scores = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
            lse_M = tl.load(lse + stat + row_0 + tl.arange(0, M), mask=row_ok, other=float("inf"))
            if SCORE is None:
                weights = tl.exp2(scores * (scale * LOG2_E) - lse_M[None, :])
            else:
                scores = scores * scale
                mod_q = mod_index(index_maps[2], row, row_ok)[None, :]
                modified = SCORE(scores, b + index_maps[0], h + index_maps[1], mod_q, mod_k, score_args)
                weights = tl.exp2(modified * LOG2_E - lse_M[None, :])
            seen = row_ok[None, :] & col_ok[:, None]
            if masked:
                seen = seen & attends(
                    mask, row[None, :], row_ok[None, :], row_0, col[:, None], first, mask_head, q_len, SLOTS, BIT_TILES
                )
                weights = tl.where(seen, weights, 0.0)
            d_out_ME = load_tile(d_out_base, row[:, None], d_out_strides[2], row_ok[:, None], e[None, :], V_DIM, True)
            d_weights = tl.dot(v_NE, tl.trans(d_out_ME), input_precision="ieee")
            dv_NE = tl.dot(weights.to(d_out_ME.dtype), d_out_ME, dv_NE, input_precision="ieee")
            delta_M = tl.load(delta + stat + row_0 + tl.arange(0, M), mask=row_ok, other=0.0)
            d_scores = weights * (d_weights - delta_M[None, :])
            if D_SCORE is not None:
                d_scores = D_SCORE(scores, b + index_maps[0], h + index_maps[1], mod_q, mod_k, d_scores, d_args)
                d_scores = tl.where(seen, d_scores, 0.0)
            dk_ND = tl.dot(d_scores.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
            run, row_0, stop = next_step(runs, run, row_0, stop, step + 1 < steps, M)
    dk_base = dk + b.to(tl.int64) * dk_strides[0] + g.to(tl.int64) * dk_strides[1]
    dv_base = dv + b.to(tl.int64) * dv_strides[0] + g.to(tl.int64) * dv_strides[1]
    at = dk_base + col[:, None].to(tl.int64) * dk_strides[2] + d[None, :]
    tl.store(at, (dk_ND * scale).to(dk.dtype.element_ty), mask=col_ok[:, None] & (d[None, :] < HEAD_DIM))
    at = dv_base + col[:, None].to(tl.int64) * dv_strides[2] + e[None, :]
    tl.store(at, dv_NE.to(dv.dtype.element_ty), mask=col_ok[:, None] & (e[None, :] < V_DIM))


@triton.jit(do_not_specialize=VARYING)
def q_kernel(
    q, k, v, d_out, lse, delta, dq,
    q_strides, k_strides, v_strides, d_out_strides, dq_strides,
    mask, records, partial_runs, full_runs, score_args, d_args, d_captures, index_maps,
    row_tiles, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, D_CAPTURES: tl.constexpr,
    SLOTS: tl.constexpr, BIT_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq of one row tile of one batch entry and head; adds to the captures' gradients where D_CAPTURES is there.

    D_CAPTURES: generated function that does what D_SCORE does, and adds to ``d_captures`` by atomic operations.
    """
    tile = (tl.program_id(0) % row_tiles).to(tl.int64)
    replica = tl.program_id(0) // row_tiles
    first, end, mask_head, partial_lo, full_lo, full_hi, steps = read_record(records + tile * 8)
    if first >= end:
        return
    if mask_batch > 1:
        b = mask_head // mask_heads
    else:
        b = replica // replica_heads
    if mask_heads > 1:
        h = mask_head % mask_heads
    else:
        h = replica % replica_heads
    g = h // group

    d = tl.arange(0, D)
    e = tl.arange(0, E)
    row = first + tl.arange(0, M)
    row_ok = row < end
    q_base = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    d_out_base = d_out + b.to(tl.int64) * d_out_strides[0] + h.to(tl.int64) * d_out_strides[1]
    k_base = k + b.to(tl.int64) * k_strides[0] + g.to(tl.int64) * k_strides[1]
    v_base = v + b.to(tl.int64) * v_strides[0] + g.to(tl.int64) * v_strides[1]
    q_MD = load_tile(q_base, row[:, None], q_strides[2], row_ok[:, None], d[None, :], HEAD_DIM, True)
    d_out_ME = load_tile(d_out_base, row[:, None], d_out_strides[2], row_ok[:, None], e[None, :], V_DIM, True)
    stat = (b.to(tl.int64) * heads + h) * q_len + row
    lse_M = tl.load(lse + stat, mask=row_ok, other=float("inf"))
    delta_M = tl.load(delta + stat, mask=row_ok, other=0.0)
    mod_q = mod_index(index_maps[2], row, row_ok)[:, None]

    runs = (full_runs, full_lo, full_hi, partial_runs, partial_lo)
    run = 0
    key, stop = run_bounds(runs, run, steps > 0)
    dq_MD = tl.zeros([M, D], tl.float32)
    for step in range(steps):
        col = key + tl.arange(0, N)
        col_ok = col < stop
        masked = is_masked(runs, run, key, stop, N)
        k_ND = load_tile(k_base, col[:, None], k_strides[2], col_ok[:, None], d[None, :], HEAD_DIM, True)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if SCORE is None:
            weights = tl.exp2(scores * (scale * LOG2_E) - lse_M[:, None])
        else:
            scores = scores * scale
            mod_k = mod_index(index_maps[3], col, col_ok)[None, :]
            modified = SCORE(scores, b + index_maps[0], h + index_maps[1], mod_q, mod_k, score_args)
            weights = tl.exp2(modified * LOG2_E - lse_M[:, None])
        seen = row_ok[:, None] & col_ok[None, :]
        if masked:
            seen = seen & attends(
                mask, row[:, None], row_ok[:, None], first, col[None, :], key, mask_head, q_len, SLOTS, BIT_TILES
            )
            weights = tl.where(seen, weights, 0.0)
        v_NE = load_tile(v_base, col[:, None], v_strides[2], col_ok[:, None], e[None, :], V_DIM, True)
        d_weights = tl.dot(d_out_ME, tl.trans(v_NE), input_precision="ieee")
        d_scores = weights * (d_weights - delta_M[:, None])
        if D_SCORE is not None:
            if D_CAPTURES is None:
                d_scores = D_SCORE(scores, b + index_maps[0], h + index_maps[1], mod_q, mod_k, d_scores, d_args)
            else:
                d_scores = D_CAPTURES(
                    scores, b + index_maps[0], h + index_maps[1], mod_q, mod_k, d_scores, d_args, seen, d_captures
                )
            d_scores = tl.where(seen, d_scores, 0.0)
        dq_MD = tl.dot(d_scores.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")
        run, key, stop = next_step(runs, run, key, stop, step + 1 < steps, N)
    dq_base = dq + b.to(tl.int64) * dq_strides[0] + h.to(tl.int64) * dq_strides[1]
    at = dq_base + row[:, None].to(tl.int64) * dq_strides[2] + d[None, :]
    tl.store(at, (dq_MD * scale).to(dq.dtype.element_ty), mask=row_ok[:, None] & (d[None, :] < HEAD_DIM))
