"""Attention in plain torch, tile by tile: any mod, any dtype, any device, O(tile) memory; slow and right.

Forward: online softmax (Milakov and Gimelshein, 2018) over key tiles, as in FlashAttention (Dao et al., 2022).
Backward: the scores of a tile are computed again from q, k and the saved LSE.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim; the same letters name a tile's part of that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.fx_program import ScatterAdd
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import (
    AttentionGradients,
    AttentionOutput,
    AttentionRequest,
    Backend,
    RequestFacts,
    ScoreProgram,
)
from magi_flex.kernels.tile_mask import RowTileMask

Q_TILE, KV_TILE = 256, 512
TILE_ELEMENTS = 1 << 22  # scores held at once, over heads and batch entries
LOG2_E = math.log2(math.e)


class TiledBackend(Backend):
    """Serves every request."""

    name = "tiled"

    def missing(self, device: torch.device) -> str | None:
        return None

    def objections(self, facts: RequestFacts) -> list[str]:
        return []

    def forward(self, request: AttentionRequest) -> AttentionOutput:
        q, v = request.q, request.v
        batch, heads, q_len, _ = q.shape
        work = work_dtype(q.dtype)
        out_dtype = work if request.wide_results else q.dtype
        out = empty_in_order(q, (batch, heads, q_len, v.shape[3]), fill_order(q), out_dtype)
        lse = q.new_empty((batch, heads, q_len), dtype=work)
        max_score = torch.empty_like(lse)
        for part in parts(request):
            for row in range(0, q_len, part.q_tile):
                rows = slice(row, min(row + part.q_tile, q_len))
                at = (part.batch, part.heads, rows)
                out[at], lse[at], max_score[at] = self._forward_rows(request, part, rows)
        return AttentionOutput(out, lse, max_score)

    def _forward_rows(self, request: AttentionRequest, part: Part, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQD = part.queries(request.q, rows)
        top_BHQ = q_BHQD.new_full(q_BHQD.shape[:3], -math.inf)
        total_BHQ = torch.zeros_like(top_BHQ)
        acc_BHQE = q_BHQD.new_zeros((*q_BHQD.shape[:3], request.v.shape[3]))
        mask = RowTileMask(request.plan, part.batch, part.heads, rows.start, rows.stop, part.kv_tile)
        for begin, end in mask.key_tiles():
            keys = slice(begin, end)
            mask_BHQK = mask.mask(begin, end)
            scores = part.scores(request, q_BHQD, keys)
            scores = part.modified(request.score, scores, mask_BHQK, rows, keys)
            if mask_BHQK is not None:
                scores = torch.where(mask_BHQK, scores, -math.inf)
            new_top = torch.maximum(top_BHQ, scores.amax(-1))
            shift = new_top.masked_fill(new_top == -math.inf, 0)
            weights = torch.exp(scores - shift[..., None])
            rescale = torch.exp(top_BHQ - shift)
            total_BHQ = total_BHQ * rescale + weights.sum(-1)
            acc_BHQE = acc_BHQE * rescale[..., None] + part.times_keys(weights, part.keys(request.v, keys))
            top_BHQ = new_top
        empty = top_BHQ == -math.inf
        out = acc_BHQE / total_BHQ.masked_fill(empty, 1)[..., None]
        lse = (top_BHQ + total_BHQ.log()).masked_fill(empty, -math.inf)
        return out.masked_fill(empty[..., None], 0), lse * LOG2_E, top_BHQ * LOG2_E

    def backward(
        self, request: AttentionRequest, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> AttentionGradients:
        q, k, v, score = request.q, request.k, request.v, request.score
        work = work_dtype(q.dtype)
        dtypes = [work] * 3 if request.wide_results else [q.dtype, k.dtype, v.dtype]
        dq, dk, dv = (empty_in_order(x, x.shape, fill_order(x), t) for x, t in zip((q, k, v), dtypes, strict=True))
        totals = [
            x.new_zeros(x.shape, dtype=work_dtype(x.dtype)) if wanted else None
            for x, wanted in zip(score.captures, score.needs_grad, strict=False)
        ]
        for part in parts(request):
            groups = (part.batch, part.kv_heads)
            dk_BGKD = k[groups].new_zeros(k[groups].shape, dtype=work)
            dv_BGKE = v[groups].new_zeros(v[groups].shape, dtype=work)
            for row in range(0, q.shape[2], part.q_tile):
                rows = slice(row, min(row + part.q_tile, q.shape[2]))
                at = (part.batch, part.heads, rows)
                d_out_BHQE = d_out[at].to(work)
                delta_BHQ = (out[at].to(work) * d_out_BHQE).sum(-1)
                if d_lse is not None:
                    delta_BHQ = delta_BHQ - d_lse[at].to(work) * LOG2_E
                lse_BHQ = lse[at].to(work) / LOG2_E
                dq[at] = self._backward_rows(
                    request, part, rows, lse_BHQ, d_out_BHQE, delta_BHQ, dk_BGKD, dv_BGKE, totals
                )
            dk[groups], dv[groups] = dk_BGKD, dv_BGKE
        grads = (None if t is None else t.to(x.dtype) for x, t in zip(score.captures, totals, strict=False))
        return AttentionGradients(dq, dk, dv, tuple(grads))

    def _backward_rows(
        self,
        request: AttentionRequest,
        part: Part,
        rows: slice,
        lse_BHQ: Tensor,
        d_out_BHQE: Tensor,
        delta_BHQ: Tensor,
        dk_BGKD: Tensor,
        dv_BGKE: Tensor,
        totals: list[Tensor | None],
    ) -> Tensor:
        """Adds to dk, dv and the captures' ``totals``; returns dq of these rows."""
        q_BHQD = part.queries(request.q, rows)
        dq_BHQD = torch.zeros_like(q_BHQD)
        shift_BHQ = lse_BHQ.masked_fill(lse_BHQ == -math.inf, math.inf)  # an empty row has no weights
        mask = RowTileMask(request.plan, part.batch, part.heads, rows.start, rows.stop, part.kv_tile)
        for begin, end in mask.key_tiles():
            keys = slice(begin, end)
            mask_BHQK = mask.mask(begin, end)
            scores = part.scores(request, q_BHQD, keys)
            weights = torch.exp(part.modified(request.score, scores, mask_BHQK, rows, keys) - shift_BHQ[..., None])
            if mask_BHQK is not None:
                weights = torch.where(mask_BHQK, weights, 0)
            d_weights = part.times_values(d_out_BHQE, part.keys(request.v, keys))
            d_scores = torch.where(weights == 0, 0, weights * (d_weights - delta_BHQ[..., None]))
            d_scores = part.unmodified(request.score, scores, d_scores, mask_BHQK, rows, keys, totals)
            if mask_BHQK is not None:
                d_scores = torch.where(mask_BHQK, d_scores, 0)
            d_scores = d_scores * request.scale
            dq_BHQD += part.times_keys(d_scores, part.keys(request.k, keys))
            dk_BGKD[:, :, keys] += part.times_rows(d_scores, q_BHQD)
            dv_BGKE[:, :, keys] += part.times_rows(weights, d_out_BHQE)
        return dq_BHQD


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Part:
    """The batch entries and heads that are computed together, and the tile sizes for them."""

    batch: slice
    heads: slice
    kv_heads: slice
    group: int
    q_tile: int
    kv_tile: int
    work: torch.dtype

    # ---- products -----------------------------------------------------------------------------------------------

    def queries(self, x_BHQD: Tensor, rows: slice) -> Tensor:
        return x_BHQD[self.batch, self.heads, rows].to(self.work)

    def keys(self, x_BGKD: Tensor, keys: slice) -> Tensor:
        return x_BGKD[self.batch, self.kv_heads, keys].to(self.work)

    def _grouped(self, x_BHQX: Tensor) -> Tensor:
        """[B, H, Q, X] -> [B, G, group * Q, X]: the query heads of one key/value head become rows."""
        return x_BHQX.unflatten(1, (-1, self.group)).flatten(2, 3)

    def _ungrouped(self, x_BGPX: Tensor) -> Tensor:
        return x_BGPX.unflatten(2, (self.group, -1)).flatten(1, 2)

    def times_values(self, x_BHQE: Tensor, v_BGKE: Tensor) -> Tensor:
        """[B, H, Q, K]: products of rows and keys."""
        return self._ungrouped(self._grouped(x_BHQE) @ v_BGKE.transpose(-1, -2))

    def times_keys(self, w_BHQK: Tensor, x_BGKD: Tensor) -> Tensor:
        """[B, H, Q, D]: weighted sums over keys."""
        return self._ungrouped(product_of_nonzeros(self._grouped(w_BHQK), x_BGKD))

    def times_rows(self, w_BHQK: Tensor, x_BHQD: Tensor) -> Tensor:
        """[B, G, K, D]: weighted sums over the rows of all query heads that share a key head."""
        return product_of_nonzeros(self._grouped(w_BHQK).transpose(-1, -2), self._grouped(x_BHQD))

    def scores(self, request: AttentionRequest, q_BHQD: Tensor, keys: slice) -> Tensor:
        return self.times_values(q_BHQD, self.keys(request.k, keys)) * request.scale

    # ---- score mods ---------------------------------------------------------------------------------------------

    def _indices(self, score: ScoreProgram, like: Tensor, rows: slice, keys: slice) -> list[Tensor]:
        """b, h, q, k of a tile as the score mod sees them, broadcastable to [B, H, Q, K]."""
        index_map = score.index_map
        b = torch.arange(self.batch.start, self.batch.stop, device=like.device) + index_map.b_offset
        h = torch.arange(self.heads.start, self.heads.stop, device=like.device) + index_map.h_offset
        q, k = (
            torch.arange(part.start, part.stop, device=like.device) if index is None else index[part].long()
            for part, index in ((rows, index_map.q_index), (keys, index_map.k_index))
        )
        return [b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), k.view(1, 1, 1, -1)]

    def modified(
        self, score: ScoreProgram, scores: Tensor, mask_BHQK: Tensor | None, rows: slice, keys: slice
    ) -> Tensor:
        if score.is_identity:
            return scores
        assert score.forward is not None
        args = [scores, *self._indices(score, scores, rows, keys), *score.captures]
        return score.forward.run(args, scores.device, self.work, mask_BHQK).to(self.work).expand(scores.shape)

    def unmodified(
        self,
        score: ScoreProgram,
        scores: Tensor,
        d_scores: Tensor,
        mask_BHQK: Tensor | None,
        rows: slice,
        keys: slice,
        totals: list[Tensor | None],
    ) -> Tensor:
        """Gradient of the scores before the mod; adds the captures' gradients to ``totals``."""
        if score.is_identity:
            return d_scores
        assert score.joint is not None
        args = [scores, *self._indices(score, scores, rows, keys), d_scores, *score.captures]
        before, _, _, _, _, *captured = score.joint.run(args, scores.device, self.work, mask_BHQK)
        for total, grad in zip(totals, captured, strict=False):
            if total is None or grad is None:
                continue
            if isinstance(grad, ScatterAdd):
                grad.add_to(total)
            else:
                total += grad
        if before is None:
            return torch.zeros_like(d_scores)
        return before.to(self.work).expand(scores.shape)


def parts(request: AttentionRequest) -> Iterator[Part]:
    """Cut the batch and the heads so that a tile's scores stay within TILE_ELEMENTS."""
    batch, heads, q_len, _ = request.q.shape
    kv_heads, kv_len = request.k.shape[1:3]
    group = heads // max(1, kv_heads)
    q_tile, kv_tile = Q_TILE, KV_TILE
    if request.plan.bit_tiles is not None:
        q_tile = math.lcm(q_tile, request.plan.bit_tiles.q_tile)
        kv_tile = math.lcm(kv_tile, request.plan.bit_tiles.kv_tile)
    at_once = max(1, TILE_ELEMENTS // max(1, min(q_tile, q_len) * min(kv_tile, kv_len)))
    g_step = max(1, min(kv_heads, at_once // max(1, group)))
    b_step = max(1, at_once // max(1, heads)) if g_step == kv_heads else 1
    for b in range(0, batch, b_step):
        for g in range(0, kv_heads, g_step):
            kv = slice(g, min(g + g_step, kv_heads))
            yield Part(
                slice(b, min(b + b_step, batch)),
                slice(kv.start * group, kv.stop * group),
                kv,
                group,
                q_tile,
                kv_tile,
                work_dtype(request.q.dtype),
            )


def product_of_nonzeros(weights: Tensor, x: Tensor) -> Tensor:
    """``weights @ x``, where a weight of zero (a pair that does not attend) hides even inf and NaN in ``x``."""
    finite = x.isfinite()
    if bool(finite.all()):
        return weights @ x
    used = (weights != 0).to(x.dtype)
    result = weights @ torch.where(finite, x, 0)
    for value, present in ((math.nan, x.isnan()), (math.inf, x == math.inf), (-math.inf, x == -math.inf)):
        result = result + torch.where(used @ present.to(x.dtype) > 0, value, 0)
    return result
