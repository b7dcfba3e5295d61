"""The forward kernel for Hopper, in Gluon: warp groups that compute beside a warp that loads.

Two warp groups each keep half of a row tile; a third partition, one warp, walks the same steps and fills a ring of key
and value tiles by TMA.  A warp group starts the product of the next step's scores before it waits for the product with
the values of the step before, so that its softmax runs beside the latter, and the two groups fill each other's gaps
(FlashAttention-3, Shah et al., 2024).  Programs are persistent: the next row tile's queries and first keys are loaded
while the results of the last one are stored.

Records, runs, masks and score mods are those of triton_forward.  Shape legend there; M is the whole tile's rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from magi_flex.kernels.hopper_tiles import GROUPS, find_tile, new_barriers, new_ring, next_slot, store_rows, turns_of
from magi_flex.kernels.triton_forward import LOG2_E, VARYING, mod_index
from magi_flex.kernels.triton_mask import attends_beyond, first_interval
from magi_flex.kernels.triton_runs import is_masked, next_step, run_bounds

_LOADER_REGISTERS = gl.constexpr(40)
_WORKER_REGISTERS = gl.constexpr(232)


@gluon.jit
def load_tiles(descs, rings, plan, group, STAGES: gl.constexpr, N: gl.constexpr):
    """The partition that loads."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready, v_free = rings
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    slot = 0
    parity = 0
    tiles = 0
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, h = find_tile(turn, plan)
        if first < end:
            mbarrier.wait(q_free.index(0), (tiles & 1) ^ 1)
            mbarrier.expect(q_ready.index(0), GROUPS * q_desc.block_type.nbytes)
            for part in gl.static_range(GROUPS):
                row = first + part * ROWS
                tma.async_copy_global_to_shared(q_desc, [b, h, row, 0], q_ready.index(0), q_ring.index(part))
            tiles += 1
            g = h // group
            run = 0
            key, stop = run_bounds(runs, run, 0 < steps)
            for step in range(0, steps):
                mbarrier.wait(k_free.index(slot), parity ^ 1)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [b, g, key, 0], k_ready.index(slot), k_ring.index(slot))
                mbarrier.wait(v_free.index(slot), parity ^ 1)
                mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [b, g, key, 0], v_ready.index(slot), v_ring.index(slot))
                slot, parity = next_slot(slot, parity, STAGES)
                run, key, stop = next_step(runs, run, key, stop, step + 1 < steps, N)


@gluon.jit
def softmax_step(
    scores, top, to_base_2, runs, run, key, stop, rows, mod, scale,
    SCORE: gl.constexpr, SLOTS: gl.constexpr, BIT_TILES: gl.constexpr, POSITIVE_SCALE: gl.constexpr, N: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(weights, maxima, factor for what was added up before).

    ``rows``: what the mask needs to know of the rows; ``mod``: what the score mod does.
    """
    known, mask, row_M1, row_ok_M1, first, mask_head, q_len = rows
    score_args, mod_b, mod_h, mod_q, k_index = mod
    col = key + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    col_ok = col < stop
    if SCORE is None:
        if not POSITIVE_SCALE:
            scores = scores * scale
    else:
        mod_k = mod_index(k_index, col, col_ok)[None, :]
        scores = SCORE(scores * scale, mod_b, mod_h, mod_q, mod_k, score_args)
    if is_masked(runs, run, key, stop, N):
        seen = attends_beyond(
            known, mask, row_M1, row_ok_M1, first, col[None, :], key, mask_head, q_len, SLOTS, BIT_TILES
        )
        scores = gl.where(seen & col_ok[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * to_base_2)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * to_base_2 - shift[:, None])
    return weights, new_top, gl.exp2(top - shift)


@gluon.jit
def attend_rows(
    rings, plan, results, mask, score_args, index_maps, q_len, heads, scale,
    PART: gl.constexpr, SCORE: gl.constexpr, SLOTS: gl.constexpr, BIT_TILES: gl.constexpr, V_DIM: gl.constexpr,
    STAGES: gl.constexpr, N: gl.constexpr, POSITIVE_SCALE: gl.constexpr,
):  # fmt: skip
    """A partition that computes: rows PART * ROWS and on of every tile."""
    q_ring, k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready, v_free = rings
    out, lse, max_score, out_strides = results
    ROWS: gl.constexpr = q_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    E: gl.constexpr = v_ring.shape[4]
    DTYPE: gl.constexpr = q_ring.dtype
    MN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ME: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    ME_A: gl.constexpr = gl.DotOperandLayout(0, ME, 2)
    q_MD = q_ring.index(PART).reshape([ROWS, D])
    slot = 0
    parity = 0
    tiles = 0
    if SCORE is None and POSITIVE_SCALE:
        to_base_2 = scale * LOG2_E
    else:
        to_base_2 = gl.to_tensor(LOG2_E)
    for turn in range(0, turns_of(plan)):
        first, end, mask_head, runs, steps, b, h = find_tile(turn, plan)
        if first < end:
            row = first + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MN))
            row_ok = row < end
            row_M1 = row[:, None]
            row_ok_M1 = row_ok[:, None]
            known = first_interval(mask, row_M1, row_ok_M1, mask_head, q_len)
            rows = (known, mask, row_M1, row_ok_M1, first, mask_head, q_len)
            mod_q = mod_index(index_maps[2], row_M1, row_ok_M1)
            mod = (score_args, b + index_maps[0], h + index_maps[1], mod_q, index_maps[3])
            top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MN))
            total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, MN))
            acc = gl.zeros([ROWS, E], gl.float32, layout=ME)
            nothing = gl.zeros([ROWS, N], gl.float32, layout=MN)
            mbarrier.wait(q_ready.index(0), tiles & 1)
            tiles += 1
            run = 0
            key, stop = run_bounds(runs, run, 0 < steps)
            if steps > 0:
                mbarrier.wait(k_ready.index(slot), parity)
                k_DN = k_ring.index(slot).reshape([N, D]).permute((1, 0))
                scores = warpgroup_mma(q_MD, k_DN, nothing, use_acc=False)
                mbarrier.arrive(k_free.index(slot))
                weights, top, fade = softmax_step(
                    scores, top, to_base_2, runs, run, key, stop, rows, mod, scale,
                    SCORE, SLOTS, BIT_TILES, POSITIVE_SCALE, N, MN,
                )  # fmt: skip
                total = gl.sum(weights, 1)
                p_MN = gl.convert_layout(weights.to(DTYPE), ME_A)
                for _ in range(1, steps):
                    run, key, stop = next_step(runs, run, key, stop, True, N)
                    before = slot
                    parity_before = parity
                    slot, parity = next_slot(slot, parity, STAGES)
                    mbarrier.wait(k_ready.index(slot), parity)
                    k_DN = k_ring.index(slot).reshape([N, D]).permute((1, 0))
                    scores = warpgroup_mma(q_MD, k_DN, nothing, use_acc=False, is_async=True)
                    mbarrier.wait(v_ready.index(before), parity_before)
                    adding = warpgroup_mma(p_MN, v_ring.index(before).reshape([N, E]), acc, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=(scores,))
                    mbarrier.arrive(k_free.index(slot))
                    weights, top, fade = softmax_step(
                        scores, top, to_base_2, runs, run, key, stop, rows, mod, scale,
                        SCORE, SLOTS, BIT_TILES, POSITIVE_SCALE, N, MN,
                    )  # fmt: skip
                    total = total * fade + gl.sum(weights, 1)
                    acc = warpgroup_mma_wait(0, deps=(adding,))
                    mbarrier.arrive(v_free.index(before))
                    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, ME))[:, None]
                    p_MN = gl.convert_layout(weights.to(DTYPE), ME_A)
                mbarrier.arrive(q_free.index(0))
                mbarrier.wait(v_ready.index(slot), parity)
                acc = warpgroup_mma(p_MN, v_ring.index(slot).reshape([N, E]), acc)
                mbarrier.arrive(v_free.index(slot))
                slot, parity = next_slot(slot, parity, STAGES)
            else:
                mbarrier.arrive(q_free.index(0))

            # No weight at all: an empty row.  (A NaN among the scores makes the total NaN, not 0.)
            empty = total == 0.0
            lse_M = gl.where(empty, float("-inf"), top + gl.log2(gl.where(empty, 1.0, total)))
            stat = (b.to(gl.int64) * heads + h) * q_len + row
            gl.store(lse + stat, lse_M, mask=row_ok)
            gl.store(max_score + stat, top, mask=row_ok)
            factor = gl.convert_layout(gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)), gl.SliceLayout(1, ME))
            store_rows(out, out_strides, b, h, acc * factor[:, None], first + PART * ROWS, end, V_DIM)


@gluon.jit(do_not_specialize=[*VARYING, "replicas", "items"])
def forward_kernel(
    q_desc, k_desc, v_desc, out, lse, max_score, out_strides,
    mask, records, partial_runs, full_runs, score_args, index_maps,
    replicas, items, q_len, heads, group, mask_batch, mask_heads, replica_heads, scale,
    SCORE: gl.constexpr, SLOTS: gl.constexpr, BIT_TILES: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    POSITIVE_SCALE: gl.constexpr,
):  # fmt: skip
    """As triton_forward's kernel, without splits and packed heads.

    Args:
        q_desc, k_desc, v_desc: tensor maps of rank 4 in boxes of M / 2 queries, or N keys.
        replicas: batch entries and heads that share a row tile.
        items: row tiles times replicas, which the programs share.
    """
    N: gl.constexpr = k_desc.block_type.shape[2]
    rings = (
        new_ring(q_desc, GROUPS), new_ring(k_desc, STAGES), new_ring(v_desc, STAGES),
        new_barriers(1, 1), new_barriers(1, GROUPS),
        new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS), new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
    )  # fmt: skip
    plan = (records, partial_runs, full_runs, replicas, items, mask_batch, mask_heads, replica_heads)
    results = (out, lse, max_score, out_strides)
    gl.warp_specialize(
        [
            (
                attend_rows,
                (
                    rings, plan, results, mask, score_args, index_maps, q_len, heads, scale,
                    0, SCORE, SLOTS, BIT_TILES, V_DIM, STAGES, N, POSITIVE_SCALE,
                ),
            ),
            (
                attend_rows,
                (
                    rings, plan, results, mask, score_args, index_maps, q_len, heads, scale,
                    1, SCORE, SLOTS, BIT_TILES, V_DIM, STAGES, N, POSITIVE_SCALE,
                ),
            ),
            (load_tiles, ((q_desc, k_desc, v_desc), rings, plan, group, STAGES, N)),
        ],
        [4, 1],
        [_WORKER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
