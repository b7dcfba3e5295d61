"""The backward kernels for Hopper, in Gluon: the two of triton_backward, laid out as in hopper_forward.

Shape legend: M queries and N keys of a warp group's tile or a step, D query/key head dim, E value head dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from magi_flex.kernels.hopper_tiles import (
    GROUPS,
    find_tile,
    new_barriers,
    new_ring,
    next_slot,
    slot_before,
    store_rows,
    turns_of,
)
from magi_flex.kernels.triton_forward import LOG2_E, VARYING, mod_index
from magi_flex.kernels.triton_mask import attends, attends_beyond, first_interval
from magi_flex.kernels.triton_runs import is_masked, next_step, run_bounds

_LOADER_REGISTERS = gl.constexpr(24)
_WORKER_REGISTERS = gl.constexpr(240)
_LANES = gl.constexpr(32)


@gluon.jit
def load_queries(descs, rings, plan, group, STAGES: gl.constexpr, M: gl.constexpr):
    """A partition that loads for kv_kernel: a tile of keys and values, then queries and output gradients."""
    k_desc, v_desc, q_desc, d_out_desc = descs
    k_ring, v_ring, q_ring, d_out_ring, lse_ring, delta_ring, kept_ready, kept_free, q_ready, d_out_ready, free = rings
    COLS: gl.constexpr = k_desc.block_type.shape[2]
    slot = 0
    parity = 0
    tiles = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, g = find_tile(turn, plan)
        if first < end:
            mbarrier.wait(kept_free.index(0), (tiles & 1) ^ 1)
            mbarrier.expect(kept_ready.index(0), GROUPS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
            for part in gl.static_range(GROUPS):
                col = first + part * COLS
                tma.async_copy_global_to_shared(k_desc, [b, g, col, 0], kept_ready.index(0), k_ring.index(part))
                tma.async_copy_global_to_shared(v_desc, [b, g, col, 0], kept_ready.index(0), v_ring.index(part))
            tiles += 1
            h = g * group
            step = 0
            run = 0
            row, stop = run_bounds(runs, run, 0 < steps)
            for _ in range(0, steps * group):
                mbarrier.wait(free.index(slot), parity ^ 1)
                mbarrier.expect(q_ready.index(slot), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], q_ready.index(slot), q_ring.index(slot))
                mbarrier.expect(d_out_ready.index(slot), d_out_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    d_out_desc, [b, h, row, 0], d_out_ready.index(slot), d_out_ring.index(slot)
                )
                slot, parity = next_slot(slot, parity, STAGES)
                h, step, run, row, stop = next_query(runs, h, step, steps, run, row, stop, M)


@gluon.jit
def load_statistics(rings, plan, lse, delta, q_len, heads, group, STAGES: gl.constexpr, M: gl.constexpr):
    """A partition that loads for kv_kernel: LSE and delta of the queries, whose addresses TMA could not take."""
    k_ring, v_ring, q_ring, d_out_ring, lse_ring, delta_ring, kept_ready, kept_free, q_ready, d_out_ready, free = rings
    slot = 0
    parity = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, g = find_tile(turn, plan)
        if first < end:
            h = g * group
            step = 0
            run = 0
            row, stop = run_bounds(runs, run, 0 < steps)
            for _ in range(0, steps * group):
                mbarrier.wait(free.index(slot), parity ^ 1)
                at = row + gl.arange(0, M, layout=gl.BlockedLayout([1], [_LANES], [1], [0]))
                stat = (b.to(gl.int64) * heads + h) * q_len
                async_copy.async_copy_global_to_shared(lse_ring.index(slot), lse + stat + at, mask=at < q_len)
                async_copy.async_copy_global_to_shared(delta_ring.index(slot), delta + stat + at, mask=at < q_len)
                async_copy.mbarrier_arrive(q_ready.index(slot), increment_count=False)
                slot, parity = next_slot(slot, parity, STAGES)
                h, step, run, row, stop = next_query(runs, h, step, steps, run, row, stop, M)


@gluon.jit
def next_query(runs, h, step, steps, run, row, stop, M: gl.constexpr):
    """(head, number among its steps, run, first, end of run) of the next step; behind a head's last, the next head."""
    step += 1
    if step == steps:
        h += 1
        step = 0
        run = 0
        row, stop = run_bounds(runs, run)
    else:
        run, row, stop = next_step(runs, run, row, stop, True, M)
    return h, step, run, row, stop


@gluon.jit
def gather_keys(
    rings, plan, results, mask, score_args, d_args, index_maps, q_len, group, scale,
    PART: gl.constexpr, SCORE: gl.constexpr, D_SCORE: gl.constexpr, SLOTS: gl.constexpr, BIT_TILES: gl.constexpr,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """A partition that computes dk and dv of its keys of every tile."""
    k_ring, v_ring, q_ring, d_out_ring, lse_ring, delta_ring, kept_ready, kept_free, q_ready, d_out_ready, free = rings
    dk, dv, dk_strides, dv_strides = results
    N: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = k_ring.shape[4]
    E: gl.constexpr = v_ring.shape[4]
    DTYPE: gl.constexpr = k_ring.dtype
    NM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    ND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    NE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, NM)
    k_ND = k_ring.index(PART).reshape([N, D])
    v_NE = v_ring.index(PART).reshape([N, E])
    slot = 0
    parity = 0
    tiles = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, g = find_tile(turn, plan)
        if first < end:
            col = first + PART * N + gl.arange(0, N, layout=gl.SliceLayout(1, NM))
            col_N1 = col[:, None]
            col_ok_N1 = col_N1 < end
            mod_k = mod_index(index_maps[3], col_N1, col_ok_N1)
            mbarrier.wait(kept_ready.index(0), tiles & 1)
            tiles += 1
            dk_ND = gl.zeros([N, D], gl.float32, layout=ND)
            dv_NE = gl.zeros([N, E], gl.float32, layout=NE)
            nothing = gl.zeros([N, M], gl.float32, layout=NM)
            # The product for dk is held back by one step; there is nothing to add, at first.
            d_scores_A = gl.zeros([N, M], DTYPE, layout=gl.DotOperandLayout(0, ND, 2))
            h = g * group
            step = 0
            run = 0
            query, stop = run_bounds(runs, run, 0 < steps)
            for uses in range(0, steps * group):
                before = slot_before(slot, uses, STAGES)
                mbarrier.wait(q_ready.index(slot), parity)
                q_DM = q_ring.index(slot).reshape([M, D]).permute((1, 0))
                scores = warpgroup_mma(k_ND, q_DM, nothing, use_acc=False, is_async=True)
                dk_ND = warpgroup_mma(d_scores_A, q_ring.index(before).reshape([M, D]), dk_ND, is_async=True)
                mbarrier.wait(d_out_ready.index(slot), parity)
                d_out_ME = d_out_ring.index(slot).reshape([M, E])
                d_weights = warpgroup_mma(v_NE, d_out_ME.permute((1, 0)), nothing, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(2, deps=(scores,))
                lse_M = lse_ring.index(slot).load(ROW)
                row = query + gl.arange(0, M, layout=ROW)
                row_ok = row < stop
                if SCORE is None:
                    weights = gl.exp2(scores * (scale * LOG2_E) - lse_M[None, :])
                else:
                    scores = scores * scale
                    mod_q = mod_index(index_maps[2], row, row_ok)[None, :]
                    mod_b = b + index_maps[0]
                    mod_h = h + index_maps[1]
                    modified = SCORE(scores, mod_b, mod_h, mod_q, mod_k, score_args)
                    weights = gl.exp2(modified * LOG2_E - lse_M[None, :])
                if is_masked(runs, run, query, stop, M):
                    seen = attends(
                        mask, row[None, :], row_ok[None, :], query, col_N1, first, mask_head, q_len, SLOTS, BIT_TILES
                    )
                    weights = gl.where(seen & row_ok[None, :] & col_ok_N1, weights, 0.0)
                d_weights, dk_ND = warpgroup_mma_wait(0, deps=(d_weights, dk_ND))
                mbarrier.arrive(free.index(before), pred=uses > 0)
                weights_A = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, NE, 2))
                dv_NE = warpgroup_mma(weights_A, d_out_ME, dv_NE, is_async=True)
                delta_M = delta_ring.index(slot).load(ROW)
                d_scores = weights * (d_weights - delta_M[None, :])
                if D_SCORE is not None:
                    d_scores = D_SCORE(scores, mod_b, mod_h, mod_q, mod_k, d_scores, d_args)
                    d_scores = gl.where(weights != 0.0, d_scores, 0.0)
                d_scores_A = gl.convert_layout(d_scores.to(DTYPE), gl.DotOperandLayout(0, ND, 2))
                dv_NE = warpgroup_mma_wait(0, deps=(dv_NE,))
                slot, parity = next_slot(slot, parity, STAGES)
                h, step, run, query, stop = next_query(runs, h, step, steps, run, query, stop, M)
            if steps > 0:
                before = slot_before(slot, steps, STAGES)
                dk_ND = warpgroup_mma(d_scores_A, q_ring.index(before).reshape([M, D]), dk_ND)
                mbarrier.arrive(free.index(before))
            mbarrier.arrive(kept_free.index(0))
            store_rows(dk, dk_strides, b, g, dk_ND * scale, first + PART * N, end, HEAD_DIM)
            store_rows(dv, dv_strides, b, g, dv_NE, first + PART * N, end, V_DIM)


@gluon.jit(do_not_specialize=[*VARYING, "replicas", "items"])
def kv_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse, delta, dk, dv, dk_strides, dv_strides,
    mask, records, partial_runs, full_runs, score_args, d_args, index_maps,
    replicas, items, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: gl.constexpr, D_SCORE: gl.constexpr, SLOTS: gl.constexpr, BIT_TILES: gl.constexpr,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv, as triton_backward's kernel where the heads of a group share their mask."""
    M: gl.constexpr = q_desc.block_type.shape[2]
    STATISTIC: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = (
        new_ring(k_desc, GROUPS), new_ring(v_desc, GROUPS), new_ring(q_desc, STAGES), new_ring(d_out_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], STATISTIC),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], STATISTIC),
        new_barriers(1, 1), new_barriers(1, GROUPS),
        new_barriers(STAGES, 1 + _LANES), new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
    )  # fmt: skip
    plan = (records, partial_runs, full_runs, replicas, items, mask_batch, mask_heads, replica_heads)
    results = (dk, dv, dk_strides, dv_strides)
    gl.warp_specialize(
        [
            (
                gather_keys,
                (
                    rings, plan, results, mask, score_args, d_args, index_maps, q_len, group, scale,
                    0, SCORE, D_SCORE, SLOTS, BIT_TILES, HEAD_DIM, V_DIM, STAGES, M,
                ),
            ),
            (
                gather_keys,
                (
                    rings, plan, results, mask, score_args, d_args, index_maps, q_len, group, scale,
                    1, SCORE, D_SCORE, SLOTS, BIT_TILES, HEAD_DIM, V_DIM, STAGES, M,
                ),
            ),
            (load_queries, ((k_desc, v_desc, q_desc, d_out_desc), rings, plan, group, STAGES, M)),
            (load_statistics, (rings, plan, lse, delta, q_len, heads, group, STAGES, M)),
        ],
        [4, 1, 1],
        [_WORKER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def load_keys(
    descs, rings, plan, group, STAGES: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """The partition that loads for q_kernel: a tile of queries and output gradients, then keys and values."""
    q_desc, d_out_desc, k_desc, v_desc = descs
    q_ring, d_out_ring, k_ring, v_ring, kept_ready, kept_free, k_ready, v_ready, free = rings
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    slot = 0
    parity = 0
    tiles = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, h = find_tile(turn, plan)
        if first < end:
            g = h // group
            mbarrier.wait(kept_free.index(0), (tiles & 1) ^ 1)
            mbarrier.expect(kept_ready.index(0), GROUPS * (q_desc.block_type.nbytes + d_out_desc.block_type.nbytes))
            for part in gl.static_range(GROUPS):
                row = first + part * ROWS
                tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], kept_ready.index(0), q_ring.index(part))
                tma.async_copy_global_to_shared(d_out_desc, [b, h, row, 0], kept_ready.index(0), d_out_ring.index(part))
            tiles += 1
            run = 0
            key, stop = run_bounds(runs, run, 0 < steps)
            for step in range(0, steps):
                mbarrier.wait(free.index(slot), parity ^ 1)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [b, g, key, 0], k_ready.index(slot), k_ring.index(slot))
                mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [b, g, key, 0], v_ready.index(slot), v_ring.index(slot))
                slot, parity = next_slot(slot, parity, STAGES)
                run, key, stop = next_step(runs, run, key, stop, step + 1 < steps, N)


@gluon.jit
def gather_queries(
    rings, plan, results, lse, delta, mask, score_args, d_args, index_maps, q_len, heads, scale,
    PART: gl.constexpr, SCORE: gl.constexpr, D_SCORE: gl.constexpr, SLOTS: gl.constexpr,
    BIT_TILES: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """A partition that computes dq of its queries of every tile."""
    q_ring, d_out_ring, k_ring, v_ring, kept_ready, kept_free, k_ready, v_ready, free = rings
    dq, dq_strides = results
    M: gl.constexpr = q_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    E: gl.constexpr = v_ring.shape[4]
    DTYPE: gl.constexpr = q_ring.dtype
    MN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    MD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_MD = q_ring.index(PART).reshape([M, D])
    d_out_ME = d_out_ring.index(PART).reshape([M, E])
    slot = 0
    parity = 0
    tiles = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, h = find_tile(turn, plan)
        if first < end:
            row = first + PART * M + gl.arange(0, M, layout=gl.SliceLayout(1, MN))
            row_ok = row < end
            row_M1 = row[:, None]
            row_ok_M1 = row_ok[:, None]
            known = first_interval(mask, row_M1, row_ok_M1, mask_head, q_len)
            mod_b = b + index_maps[0]
            mod_h = h + index_maps[1]
            mod_q = mod_index(index_maps[2], row_M1, row_ok_M1)
            stat = (b.to(gl.int64) * heads + h) * q_len + row
            lse_M1 = gl.load(lse + stat, mask=row_ok, other=float("inf"))[:, None]
            delta_M1 = gl.load(delta + stat, mask=row_ok, other=0.0)[:, None]
            dq_MD = gl.zeros([M, D], gl.float32, layout=MD)
            nothing = gl.zeros([M, N], gl.float32, layout=MN)
            # The product for dq is held back by one step; there is nothing to add, at first.
            d_scores_A = gl.zeros([M, N], DTYPE, layout=gl.DotOperandLayout(0, MD, 2))
            mbarrier.wait(kept_ready.index(0), tiles & 1)
            tiles += 1
            run = 0
            key, stop = run_bounds(runs, run, 0 < steps)
            for step in range(0, steps):
                before = slot_before(slot, step, STAGES)
                mbarrier.wait(k_ready.index(slot), parity)
                k_DN = k_ring.index(slot).reshape([N, D]).permute((1, 0))
                scores = warpgroup_mma(q_MD, k_DN, nothing, use_acc=False, is_async=True)
                dq_MD = warpgroup_mma(d_scores_A, k_ring.index(before).reshape([N, D]), dq_MD, is_async=True)
                mbarrier.wait(v_ready.index(slot), parity)
                v_EN = v_ring.index(slot).reshape([N, E]).permute((1, 0))
                d_weights = warpgroup_mma(d_out_ME, v_EN, nothing, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(2, deps=(scores,))
                col = key + gl.arange(0, N, layout=gl.SliceLayout(0, MN))
                col_ok = col < stop
                if SCORE is None:
                    weights = gl.exp2(scores * (scale * LOG2_E) - lse_M1)
                else:
                    scores = scores * scale
                    mod_k = mod_index(index_maps[3], col, col_ok)[None, :]
                    modified = SCORE(scores, mod_b, mod_h, mod_q, mod_k, score_args)
                    weights = gl.exp2(modified * LOG2_E - lse_M1)
                if is_masked(runs, run, key, stop, N):
                    seen = attends_beyond(
                        known, mask, row_M1, row_ok_M1, first, col[None, :], key, mask_head, q_len, SLOTS, BIT_TILES
                    )
                    weights = gl.where(seen & col_ok[None, :], weights, 0.0)
                d_weights, dq_MD = warpgroup_mma_wait(0, deps=(d_weights, dq_MD))
                mbarrier.arrive(free.index(before), pred=step > 0)
                d_scores = weights * (d_weights - delta_M1)
                if D_SCORE is not None:
                    d_scores = D_SCORE(scores, mod_b, mod_h, mod_q, mod_k, d_scores, d_args)
                    d_scores = gl.where(weights != 0.0, d_scores, 0.0)
                d_scores_A = gl.convert_layout(d_scores.to(DTYPE), gl.DotOperandLayout(0, MD, 2))
                slot, parity = next_slot(slot, parity, STAGES)
                run, key, stop = next_step(runs, run, key, stop, step + 1 < steps, N)
            mbarrier.arrive(kept_free.index(0))
            if steps > 0:
                before = slot_before(slot, steps, STAGES)
                dq_MD = warpgroup_mma(d_scores_A, k_ring.index(before).reshape([N, D]), dq_MD)
                mbarrier.arrive(free.index(before))
            store_rows(dq, dq_strides, b, h, dq_MD * scale, first + PART * M, end, HEAD_DIM)


@gluon.jit(do_not_specialize=[*VARYING, "replicas", "items"])
def q_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse, delta, dq, dq_strides,
    mask, records, partial_runs, full_runs, score_args, d_args, index_maps,
    replicas, items, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: gl.constexpr, D_SCORE: gl.constexpr, SLOTS: gl.constexpr,
    BIT_TILES: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq, as triton_backward's kernel."""
    N: gl.constexpr = k_desc.block_type.shape[2]
    rings = (
        new_ring(q_desc, GROUPS), new_ring(d_out_desc, GROUPS), new_ring(k_desc, STAGES), new_ring(v_desc, STAGES),
        new_barriers(1, 1), new_barriers(1, GROUPS),
        new_barriers(STAGES, 1), new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
    )  # fmt: skip
    plan = (records, partial_runs, full_runs, replicas, items, mask_batch, mask_heads, replica_heads)
    results = (dq, dq_strides)
    gl.warp_specialize(
        [
            (
                gather_queries,
                (
                    rings, plan, results, lse, delta, mask, score_args, d_args, index_maps, q_len, heads,
                    scale, 0, SCORE, D_SCORE, SLOTS, BIT_TILES, HEAD_DIM, STAGES, N,
                ),
            ),
            (
                gather_queries,
                (
                    rings, plan, results, lse, delta, mask, score_args, d_args, index_maps, q_len, heads,
                    scale, 1, SCORE, D_SCORE, SLOTS, BIT_TILES, HEAD_DIM, STAGES, N,
                ),
            ),
            (load_keys, ((q_desc, d_out_desc, k_desc, v_desc), rings, plan, group, STAGES, N)),
        ],
        [4, 1],
        [_WORKER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
