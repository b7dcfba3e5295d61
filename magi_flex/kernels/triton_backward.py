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
from magi_flex.kernels.triton_runs import step_range


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
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr, TAILS: tl.constexpr,
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
    first = tl.load(record)
    end = tl.load(record + 1)
    if first >= end:
        return
    mask_head = tl.load(record + 2)
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
    # Masks take registers, of which a step with all of M would leave none for products that overlap.
    MASKED_M: tl.constexpr = M // 2 if M > 32 else M
    for member in range(group):
        h = g * group + member
        q_base = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
        d_out_base = d_out + b.to(tl.int64) * d_out_strides[0] + h.to(tl.int64) * d_out_strides[1]
        stat = (b.to(tl.int64) * heads + h) * q_len
        own = record + tl.cast(head_tiles, tl.int64) * 8 * member
        own_mask = tl.load(own + 2)
        full_lo = tl.load(own + 5)
        full_hi = tl.load(own + 6)
        dk_ND, dv_NE = visit_queries(
            dk_ND, dv_NE, k_ND, v_NE, q_base, d_out_base, lse + stat, delta + stat, q_strides[2], d_out_strides[2],
            partial_runs, 0, 0, full_runs, full_lo, full_hi,
            mask, own_mask, col[:, None], col_ok[:, None], first, q_len, d, e,
            score_args, d_args, b + index_maps[0], h + index_maps[1], index_maps[2], mod_k, scale,
            SCORE, D_SCORE, SLOTS, BIT_TILES, False, HEAD_DIM, V_DIM, M,
        )  # fmt: skip
        dk_ND, dv_NE = visit_queries(
            dk_ND, dv_NE, k_ND, v_NE, q_base, d_out_base, lse + stat, delta + stat, q_strides[2], d_out_strides[2],
            partial_runs, tl.load(own + 3), tl.load(own + 4), full_runs, full_lo, full_hi if TAILS else full_lo,
            mask, own_mask, col[:, None], col_ok[:, None], first, q_len, d, e,
            score_args, d_args, b + index_maps[0], h + index_maps[1], index_maps[2], mod_k, scale,
            SCORE, D_SCORE, SLOTS, BIT_TILES, True, HEAD_DIM, V_DIM, MASKED_M,
        )  # fmt: skip
    dk_base = dk + b.to(tl.int64) * dk_strides[0] + g.to(tl.int64) * dk_strides[1]
    dv_base = dv + b.to(tl.int64) * dv_strides[0] + g.to(tl.int64) * dv_strides[1]
    at = dk_base + col[:, None].to(tl.int64) * dk_strides[2] + d[None, :]
    tl.store(at, (dk_ND * scale).to(dk.dtype.element_ty), mask=col_ok[:, None] & (d[None, :] < HEAD_DIM))
    at = dv_base + col[:, None].to(tl.int64) * dv_strides[2] + e[None, :]
    tl.store(at, dv_NE.to(dv.dtype.element_ty), mask=col_ok[:, None] & (e[None, :] < V_DIM))


@triton.jit
def visit_queries(
    dk_ND, dv_NE, k_ND, v_NE, q_base, d_out_base, lse, delta, q_stride, d_out_stride,
    partial_runs, partial_lo, partial_hi, full_runs, full_lo, full_hi,
    mask, mask_head, col_N1, col_ok_N1, col_0, q_len, d, e,
    score_args, d_args, mod_b, mod_h, q_index, mod_k, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Adds the queries of some runs, see step_range.  Tiles are transposed: [keys, queries]."""
    for run in range(0, partial_hi - partial_lo + full_hi - full_lo):
        begin, stop = step_range(partial_runs, partial_lo, partial_hi, full_runs, full_lo, run, M, MASKED)
        for first in range(begin, stop, M):
            row = first + tl.arange(0, M)
            row_ok = row < stop
            q_MD = load_tile(q_base, row[:, None], q_stride, row_ok[:, None], d[None, :], HEAD_DIM, MASKED)
            scores = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
            if MASKED:
                lse_M = tl.load(lse + first + tl.arange(0, M), mask=row_ok, other=float("inf"))
                delta_M = tl.load(delta + first + tl.arange(0, M), mask=row_ok, other=0.0)
            else:
                lse_M = tl.load(lse + first + tl.arange(0, M))
                delta_M = tl.load(delta + first + tl.arange(0, M))
            if SCORE is None:
                weights = tl.exp2(scores * (scale * LOG2_E) - lse_M[None, :])
            else:
                scores = scores * scale
                mod_q = mod_index(q_index, row, row_ok)[None, :]
                modified = SCORE(scores, mod_b, mod_h, mod_q, mod_k, score_args)
                weights = tl.exp2(modified * LOG2_E - lse_M[None, :])
            if MASKED:
                seen = attends(
                    mask, row[None, :], row_ok[None, :], first, col_N1, col_0, mask_head, q_len, SLOTS, BIT_TILES
                )
                seen = seen & row_ok[None, :] & col_ok_N1
                weights = tl.where(seen, weights, 0.0)
            d_out_ME = load_tile(d_out_base, row[:, None], d_out_stride, row_ok[:, None], e[None, :], V_DIM, MASKED)
            d_weights = tl.dot(v_NE, tl.trans(d_out_ME), input_precision="ieee")
            dv_NE = tl.dot(weights.to(d_out_ME.dtype), d_out_ME, dv_NE, input_precision="ieee")
            d_scores = weights * (d_weights - delta_M[None, :])
            if D_SCORE is not None:
                d_scores = D_SCORE(scores, mod_b, mod_h, mod_q, mod_k, d_scores, d_args)
                if MASKED:
                    d_scores = tl.where(seen, d_scores, 0.0)
                else:
                    d_scores = tl.where(row_ok[None, :] & col_ok_N1, d_scores, 0.0)
            dk_ND = tl.dot(d_scores.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
    return dk_ND, dv_NE


@triton.jit(do_not_specialize=VARYING)
def q_kernel(
    q, k, v, d_out, lse, delta, dq,
    q_strides, k_strides, v_strides, d_out_strides, dq_strides,
    mask, records, partial_runs, full_runs, score_args, d_args, d_captures, index_maps,
    row_tiles, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, D_CAPTURES: tl.constexpr,
    SLOTS: tl.constexpr, BIT_TILES: tl.constexpr, TAILS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq of one row tile of one batch entry and head; adds to the captures' gradients where D_CAPTURES is there.

    D_CAPTURES: generated function that does what D_SCORE does, and adds to ``d_captures`` by atomic operations.
    """
    tile = (tl.program_id(0) % row_tiles).to(tl.int64)
    replica = tl.program_id(0) // row_tiles
    record = records + tile * 8
    first = tl.load(record)
    end = tl.load(record + 1)
    if first >= end:
        return
    mask_head = tl.load(record + 2)
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

    full_lo = tl.load(record + 5)
    full_hi = tl.load(record + 6)
    dq_MD = tl.zeros([M, D], tl.float32)
    dq_MD = visit_keys_again(
        dq_MD, q_MD, d_out_ME, lse_M, delta_M, k_base, v_base, k_strides[2], v_strides[2],
        partial_runs, 0, 0, full_runs, full_lo, full_hi,
        mask, mask_head, row[:, None], row_ok[:, None], first, q_len, d, e,
        score_args, d_args, d_captures, b + index_maps[0], h + index_maps[1], mod_q, index_maps[3], scale,
        SCORE, D_SCORE, D_CAPTURES, SLOTS, BIT_TILES, False, HEAD_DIM, V_DIM, N,
    )  # fmt: skip
    dq_MD = visit_keys_again(
        dq_MD, q_MD, d_out_ME, lse_M, delta_M, k_base, v_base, k_strides[2], v_strides[2],
        partial_runs, tl.load(record + 3), tl.load(record + 4), full_runs, full_lo, full_hi if TAILS else full_lo,
        mask, mask_head, row[:, None], row_ok[:, None], first, q_len, d, e,
        score_args, d_args, d_captures, b + index_maps[0], h + index_maps[1], mod_q, index_maps[3], scale,
        SCORE, D_SCORE, D_CAPTURES, SLOTS, BIT_TILES, True, HEAD_DIM, V_DIM, N,
    )  # fmt: skip
    dq_base = dq + b.to(tl.int64) * dq_strides[0] + h.to(tl.int64) * dq_strides[1]
    at = dq_base + row[:, None].to(tl.int64) * dq_strides[2] + d[None, :]
    tl.store(at, (dq_MD * scale).to(dq.dtype.element_ty), mask=row_ok[:, None] & (d[None, :] < HEAD_DIM))


@triton.jit
def visit_keys_again(
    dq_MD, q_MD, d_out_ME, lse_M, delta_M, k_base, v_base, k_stride, v_stride,
    partial_runs, partial_lo, partial_hi, full_runs, full_lo, full_hi,
    mask, mask_head, row_M1, row_ok_M1, row_0, q_len, d, e,
    score_args, d_args, d_captures, mod_b, mod_h, mod_q, k_index, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, D_CAPTURES: tl.constexpr,
    SLOTS: tl.constexpr, BIT_TILES: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Adds the keys of some runs, see step_range."""
    for run in range(0, partial_hi - partial_lo + full_hi - full_lo):
        begin, stop = step_range(partial_runs, partial_lo, partial_hi, full_runs, full_lo, run, N, MASKED)
        for key in range(begin, stop, N):
            col = key + tl.arange(0, N)
            col_ok = col < stop
            k_ND = load_tile(k_base, col[:, None], k_stride, col_ok[:, None], d[None, :], HEAD_DIM, MASKED)
            scores = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
            if SCORE is None:
                weights = tl.exp2(scores * (scale * LOG2_E) - lse_M[:, None])
            else:
                scores = scores * scale
                mod_k = mod_index(k_index, col, col_ok)[None, :]
                modified = SCORE(scores, mod_b, mod_h, mod_q, mod_k, score_args)
                weights = tl.exp2(modified * LOG2_E - lse_M[:, None])
            if MASKED:
                seen = attends(mask, row_M1, row_ok_M1, row_0, col[None, :], key, mask_head, q_len, SLOTS, BIT_TILES)
                seen = seen & row_ok_M1 & col_ok[None, :]
                weights = tl.where(seen, weights, 0.0)
            v_NE = load_tile(v_base, col[:, None], v_stride, col_ok[:, None], e[None, :], V_DIM, MASKED)
            d_weights = tl.dot(d_out_ME, tl.trans(v_NE), input_precision="ieee")
            d_scores = weights * (d_weights - delta_M[:, None])
            if D_SCORE is not None:
                if not MASKED:
                    seen = row_ok_M1 & col_ok[None, :]
                if D_CAPTURES is None:
                    d_scores = D_SCORE(scores, mod_b, mod_h, mod_q, mod_k, d_scores, d_args)
                else:
                    d_scores = D_CAPTURES(scores, mod_b, mod_h, mod_q, mod_k, d_scores, d_args, seen, d_captures)
                d_scores = tl.where(seen, d_scores, 0.0)
            dq_MD = tl.dot(d_scores.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")
    return dq_MD
