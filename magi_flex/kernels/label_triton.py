"""Triton kernels: attention whose mask is evaluated pair by pair, from labels, intervals and block lists.

They write over what another kernel has left, and only if a flag on the device says so: a CUDA graph holds them for the
mask that its faster kernels cannot walk.  So they are plain: no key is skipped, nothing is tuned.

Shape legend: M rows and N keys of a tile, D query/key head dim, E value head dim (both padded to powers of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from magi_flex.kernels.triton_mask import first_interval, in_intervals

LOG2_E = tl.constexpr(1.4426950408889634)
_PARTIAL = tl.constexpr(1)  # states of a block, see LabelledAttention.blocks
_FULL = tl.constexpr(2)


@triton.jit
def _attends(mask, blocks, b, h, row, row_ok, col, q_len, kv_len, SLOTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether each pair attends; rows and keys broadcast against each other.

    Args:
        mask: (starts, ends, slots, row labels, key labels, batch entries, heads), 1 where these are shared.
        blocks: (states, rows of a block, keys of a block, batch entries, heads), read where BLOCKS.
    """
    mask_head = (b % mask[5]).to(tl.int64) * mask[6] + h % mask[6]
    col_ok = (col >= 0) & (col < kv_len)
    known = first_interval(mask, row, row_ok, mask_head, q_len)
    result = in_intervals(known, mask, row, row_ok, col, mask_head, q_len, SLOTS)
    row_label = tl.load(mask[3] + mask_head * q_len + row, mask=row_ok, other=0)
    key_label = tl.load(mask[4] + mask_head * kv_len + col, mask=col_ok, other=0)
    result = result & (row_label == key_label)
    if BLOCKS:
        head = (b % blocks[3]).to(tl.int64) * blocks[4] + h % blocks[4]
        block_row = head * tl.cdiv(q_len, blocks[1]) + row // blocks[1]
        at = block_row * tl.cdiv(kv_len, blocks[2]) + col // blocks[2]
        state = tl.load(blocks[0] + at, mask=row_ok & col_ok, other=0)
        result = (state == _FULL) | ((state == _PARTIAL) & result)
    return result & row_ok & col_ok


@triton.jit
def _tile(base, strides, b, h, row, row_ok, COLS: tl.constexpr, PADDED: tl.constexpr):
    """Rows ``[rows, PADDED]`` of one head; 0 outside."""
    col = tl.arange(0, PADDED)
    at = base + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + row.to(tl.int64)[:, None] * strides[2]
    return tl.load(at + col[None, :] * strides[3], mask=row_ok[:, None] & (col[None, :] < COLS), other=0.0)


@triton.jit
def _store(base, strides, b, h, row, row_ok, value, COLS: tl.constexpr, PADDED: tl.constexpr):
    col = tl.arange(0, PADDED)
    at = base + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + row.to(tl.int64)[:, None] * strides[2]
    ok = row_ok[:, None] & (col[None, :] < COLS)
    tl.store(at + col[None, :] * strides[3], value.to(base.dtype.element_ty), mask=ok)


VARYING = ["score_args", "d_args", "q_len", "kv_len"]


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    wanted, q, k, v, out, lse, max_score, q_strides, k_strides, v_strides, out_strides,
    mask, blocks, score_args, q_len, kv_len, heads, group, scale,
    SCORE: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out, lse and max_score of M rows of one batch entry and head."""
    if tl.load(wanted) == 0:
        return
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    row_ok = row < q_len
    q_MD = _tile(q, q_strides, b, h, row, row_ok, HEAD_DIM, D)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    for key in range(0, kv_len, N):
        col = key + tl.arange(0, N)
        k_ND = _tile(k, k_strides, b, h // group, col, col < kv_len, HEAD_DIM, D)
        scores = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        if SCORE is not None:
            scores = SCORE(scores, b, h, row[:, None], col[None, :], score_args)
        seen = _attends(mask, blocks, b, h, row[:, None], row_ok[:, None], col[None, :], q_len, kv_len, SLOTS, BLOCKS)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        v_NE = _tile(v, v_strides, b, h // group, col, col < kv_len, V_DIM, E)
        acc = acc * fade[:, None] + tl.dot(weights.to(v_NE.dtype), v_NE, input_precision="ieee")
        top = new_top
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    _store(out, out_strides, b, h, row, row_ok, tl.where(empty[:, None], 0.0, acc / divisor[:, None]), V_DIM, E)
    stat = tl.program_id(1).to(tl.int64) * q_len + row
    tl.store(lse + stat, tl.where(empty, float("-inf"), top + tl.log2(divisor)), mask=row_ok)
    tl.store(max_score + stat, top, mask=row_ok)


@triton.jit
def _row_values(
    out, d_out, lse, d_lse, out_strides, d_out_strides, b, h, heads, row, row_ok, q_len,
    V_DIM: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """dO, the LSE (infinite for an empty row, which so has no weights) and sum(out * dO) - d_lse * log2(e)."""
    out_ME = _tile(out, out_strides, b, h, row, row_ok, V_DIM, E)
    d_out_ME = _tile(d_out, d_out_strides, b, h, row, row_ok, V_DIM, E)
    stat = (b.to(tl.int64) * heads + h) * q_len + row
    lse_M = tl.load(lse + stat, mask=row_ok, other=float("-inf"))
    empty = lse_M == float("-inf")
    delta_M = tl.sum(out_ME.to(tl.float32) * d_out_ME.to(tl.float32), 1)
    if d_lse is not None:
        delta_M -= tl.load(d_lse + stat, mask=row_ok, other=0.0) * LOG2_E
    return d_out_ME, tl.where(empty, float("inf"), lse_M), tl.where(empty, 0.0, delta_M)


@triton.jit
def _score_gradients(
    q_MD, k_ND, v_NE, d_out_ME, lse_M, delta_M, mask, blocks, score_args, d_args, b, h, row, row_ok, col, q_len, kv_len,
    scale, SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of the scaled scores, [M, N]."""
    scores = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
    modified = scores
    if SCORE is not None:
        modified = SCORE(scores, b, h, row[:, None], col[None, :], score_args)
    seen = _attends(mask, blocks, b, h, row[:, None], row_ok[:, None], col[None, :], q_len, kv_len, SLOTS, BLOCKS)
    weights = tl.where(seen, tl.exp2(modified * LOG2_E - lse_M[:, None]), 0.0)
    d_weights = tl.dot(d_out_ME, tl.trans(v_NE), input_precision="ieee")
    d_scores = weights * (d_weights - delta_M[:, None])
    if D_SCORE is not None:
        d_scores = D_SCORE(scores, b, h, row[:, None], col[None, :], d_scores, d_args)
        d_scores = tl.where(seen, d_scores, 0.0)
    return weights, d_scores


@triton.jit(do_not_specialize=VARYING)
def q_kernel(
    wanted, q, k, v, out, d_out, lse, d_lse, dq,
    q_strides, k_strides, v_strides, out_strides, d_out_strides, dq_strides,
    mask, blocks, score_args, d_args, q_len, kv_len, heads, group, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq of M rows of one batch entry and head."""
    if tl.load(wanted) == 0:
        return
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    row_ok = row < q_len
    q_MD = _tile(q, q_strides, b, h, row, row_ok, HEAD_DIM, D)
    d_out_ME, lse_M, delta_M = _row_values(
        out, d_out, lse, d_lse, out_strides, d_out_strides, b, h, heads, row, row_ok, q_len, V_DIM, E
    )
    dq_MD = tl.zeros([M, D], tl.float32)
    for key in range(0, kv_len, N):
        col = key + tl.arange(0, N)
        k_ND = _tile(k, k_strides, b, h // group, col, col < kv_len, HEAD_DIM, D)
        v_NE = _tile(v, v_strides, b, h // group, col, col < kv_len, V_DIM, E)
        _, d_scores = _score_gradients(
            q_MD, k_ND, v_NE, d_out_ME, lse_M, delta_M, mask, blocks, score_args, d_args, b, h, row, row_ok, col,
            q_len, kv_len, scale, SCORE, D_SCORE, SLOTS, BLOCKS,
        )  # fmt: skip
        dq_MD += tl.dot(d_scores.to(k_ND.dtype), k_ND, input_precision="ieee")
    _store(dq, dq_strides, b, h, row, row_ok, dq_MD * scale, HEAD_DIM, D)


@triton.jit(do_not_specialize=VARYING)
def kv_kernel(
    wanted, q, k, v, out, d_out, lse, d_lse, dk, dv,
    q_strides, k_strides, v_strides, out_strides, d_out_strides, dk_strides, dv_strides,
    mask, blocks, score_args, d_args, q_len, kv_len, heads, group, scale,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys of one batch entry and key head."""
    if tl.load(wanted) == 0:
        return
    kv_heads = heads // group
    b, g = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    col = tl.program_id(0) * N + tl.arange(0, N)
    k_ND = _tile(k, k_strides, b, g, col, col < kv_len, HEAD_DIM, D)
    v_NE = _tile(v, v_strides, b, g, col, col < kv_len, V_DIM, E)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_NE = tl.zeros([N, E], tl.float32)
    for member in range(group):
        h = g * group + member
        for first in range(0, q_len, M):
            row = first + tl.arange(0, M)
            row_ok = row < q_len
            q_MD = _tile(q, q_strides, b, h, row, row_ok, HEAD_DIM, D)
            d_out_ME, lse_M, delta_M = _row_values(
                out, d_out, lse, d_lse, out_strides, d_out_strides, b, h, heads, row, row_ok, q_len, V_DIM, E
            )
            weights, d_scores = _score_gradients(
                q_MD, k_ND, v_NE, d_out_ME, lse_M, delta_M, mask, blocks, score_args, d_args, b, h, row, row_ok, col,
                q_len, kv_len, scale, SCORE, D_SCORE, SLOTS, BLOCKS,
            )  # fmt: skip
            dv_NE += tl.dot(tl.trans(weights).to(d_out_ME.dtype), d_out_ME, input_precision="ieee")
            dk_ND += tl.dot(tl.trans(d_scores).to(q_MD.dtype), q_MD, input_precision="ieee")
    _store(dk, dk_strides, b, g, col, col < kv_len, dk_ND * scale, HEAD_DIM, D)
    _store(dv, dv_strides, b, g, col, col < kv_len, dv_NE, V_DIM, E)
