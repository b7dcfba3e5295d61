"""Ready score_mods: (score, b, h, q, k) -> score, for FlexAttention, stock or ours.

Scores are scale * q . k in natural units.  Tensor arguments become captures; those that require grad receive gradients.

Shape legend: B batch, H query heads, Q query rows, K keys, S positions shared by queries and keys, T table entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from magi_flex.mask_mods import MaskMod

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _dims(name: str, tensor: Tensor, *dims: int) -> None:
    if tensor.dim() not in dims:
        wanted = " or ".join(str(d) for d in dims)
        raise ValueError(f"{name}: has shape {list(tensor.shape)}; give {wanted} dimensions")


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap) (Gemma 2)."""
    if not cap > 0:
        raise ValueError(f"cap: is {cap}; give a number above 0")
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def temperature(factor: Tensor) -> ScoreMod:
    """score * factor for a 0-d tensor, score * factor[h] for ``[H]``; often learned."""
    _dims("factor", factor, 0, 1)
    if factor.dim() == 0:
        return lambda score, b, h, q, k: score * factor
    return lambda score, b, h, q, k: score * factor[h]


def query_temperature(factor: Tensor) -> ScoreMod:
    """score * factor[q], ``[Q]``: temperatures that grow with the log of the position (Scalable-Softmax, Llama 4)."""
    _dims("factor", factor, 1)
    return lambda score, b, h, q, k: score * factor[q]


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """ALiBi's slopes m[h], float32 ``[H]`` (Press et al., Train Short, Test Long).

    For a power of two, 2^(-8 (h + 1) / H).  Otherwise those of the power of two below H, then every second one of the
    power of two above.
    """
    if heads < 1:
        raise ValueError(f"heads: is {heads}; give at least 1")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / below) for n in range(below)]
    slopes += [2.0 ** (-4.0 * (2 * n + 1) / below) for n in range(heads - below)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi(slopes: Tensor) -> ScoreMod:
    """score - slopes[h] * |q - k|; ``slopes`` ``[H]``, see :func:`alibi_slopes`."""
    _dims("slopes", slopes, 1)
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def decay(rate: Tensor) -> ScoreMod:
    """score - rate[h] * (q - k), ``[H]``: exponential decay for causal masks (RetNet)."""
    _dims("rate", rate, 1)
    return lambda score, b, h, q, k: score - rate[h] * (q - k)


def log_gates(cumulative: Tensor) -> ScoreMod:
    """score + G[q] - G[k], G the running sum of log gates (Forgetting Transformer).

    ``cumulative`` is ``[S]``, ``[H, S]`` or ``[B, H, S]``.
    """
    _dims("cumulative", cumulative, 1, 2, 3)

    def read(b: Tensor, h: Tensor, i: Tensor) -> Tensor:
        return cumulative[(b, h, i)[3 - cumulative.dim() :]]

    return lambda score, b, h, q, k: score + read(b, h, q) - read(b, h, k)


def relative_table(table: Tensor, offset: int) -> ScoreMod:
    """score + table[h, q - k + offset], ``[H, T]``; with offset = K - 1 and T = Q + K - 1 every pair is in bounds."""
    _dims("table", table, 2)
    return lambda score, b, h, q, k: score + table[h, q - k + offset]


def t5_buckets(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Bucket of each distance q - k, int64 (Raffel et al., T5, relative position bias).

    Half of the buckets are one distance each, the rest grow logarithmically up to ``max_distance`` and beyond.
    Bidirectional: half of all buckets are for keys after the query.
    """
    first: int | Tensor = 0
    if bidirectional:
        buckets //= 2
        first = torch.where(distance < 0, buckets, 0)
        distance = distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def t5_bias(table: Tensor, max_distance: int = 128, bidirectional: bool = False) -> ScoreMod:
    """score + table[h, bucket(q - k)]; ``table`` ``[H, buckets]``, see :func:`t5_buckets`."""
    _dims("table", table, 2)
    buckets = table.shape[1]
    least = 4 if bidirectional else 2
    if buckets < least or max_distance <= buckets // least:
        raise ValueError(
            f"table, max_distance: {buckets} buckets up to distance {max_distance}; "
            f"give at least {least} buckets and a distance above {buckets // least}"
        )
    return lambda score, b, h, q, k: score + table[h, t5_buckets(q - k, buckets, max_distance, bidirectional)]


def pair_bias(bias: Tensor) -> ScoreMod:
    """score + bias[b, h, q, k]; ``[B, H, Q, K]``, B and H may be 1 (AlphaFold's pair representation)."""
    _dims("bias", bias, 4)
    by_batch, by_head = (int(size > 1) for size in bias.shape[:2])
    return lambda score, b, h, q, k: score + bias[b * by_batch, h * by_head, q, k]


def key_bias(bias: Tensor) -> ScoreMod:
    """score + bias[b, h, k]; ``[B, H, K]``, B and H may be 1."""
    _dims("bias", bias, 3)
    by_batch, by_head = (int(size > 1) for size in bias.shape[:2])
    return lambda score, b, h, q, k: score + bias[b * by_batch, h * by_head, k]


def query_dependent_bias(bias: Tensor, offset: int) -> ScoreMod:
    """score + bias[b, h, q, k - q + offset]; ``[B, H, Q, T]``: queries times relative embeddings (Transformer-XL).

    With offset = Q - 1 and T = Q + K - 1 every pair is in bounds.
    """
    _dims("bias", bias, 4)
    return lambda score, b, h, q, k: score + bias[b, h, q, k - q + offset]


def separable_bias(grid: Sequence[int], *tables: Tensor) -> ScoreMod:
    """score + sum over axes of tables[a][i_a(q) - i_a(k) + grid[a] - 1]; ``tables[a]`` is ``[2 grid[a] - 1]``.

    Positions are row-major on ``grid``, (height, width) or (depth, height, width) (Swin's bias, separated by axis).
    """
    if len(grid) != len(tables) or not tables:
        raise ValueError(f"tables: {len(tables)} given for a grid of {len(grid)} axes; give one an axis")
    for axis, (size, table) in enumerate(zip(grid, tables, strict=True)):
        if tuple(table.shape) != (2 * size - 1,):
            raise ValueError(
                f"tables[{axis}]: has shape {list(table.shape)}; [{2 * size - 1}] is needed for size {size}"
            )
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for size, stride, table in zip(grid, strides, tables, strict=True):
            score = score + table[q // stride % size - k // stride % size + (size - 1)]
        return score

    return score_mod


def soft_mask(mask_mod: MaskMod, penalty: float) -> ScoreMod:
    """score where mask_mod is true, score - penalty elsewhere."""
    return lambda score, b, h, q, k: torch.where(mask_mod(b, h, q, k), score, score - penalty)


def hard_mask(mask_mod: MaskMod) -> ScoreMod:
    """score where mask_mod is true, -inf elsewhere: right, but nothing is skipped; give a block mask where you can."""
    return lambda score, b, h, q, k: torch.where(mask_mod(b, h, q, k), score, -float("inf"))


def chain(*score_mods: ScoreMod) -> ScoreMod:
    """Score mods applied one after the other, the first one first."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for mod in score_mods:
            score = mod(score, b, h, q, k)
        return score

    return score_mod
