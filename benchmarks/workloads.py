"""Document lengths, masks and tensors that the benchmarks share."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from magi_flex.distributed.workloads import LONG_CONTEXT_CORPUS
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan

WINDOW, BLOCK = 1024, 2048
MASKS = ("full", "causal", "varlen_full", "varlen_causal", "sw_causal", "varlen_block_causal")


def document_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Lengths drawn from the long-context corpus until they fill ``tokens``; none is longer than a quarter of it.

    Shares are per cent with two digits, so that the lengths are those of the baseline table in docs/design.md.

    Raises:
        ValueError: ``tokens`` is below 4.
    """
    if tokens < 4:
        raise ValueError(f"tokens: {tokens} given, at least 4 are needed")
    rng = random.Random(seed)
    documents = sum(number for *_, number in LONG_CONTEXT_CORPUS)
    ranges = [(shortest, longest) for shortest, longest, _ in LONG_CONTEXT_CORPUS]
    shares = [round(100 * number / documents, 2) for *_, number in LONG_CONTEXT_CORPUS]
    lengths: list[int] = []
    left = tokens
    while left > 0:
        ((shortest, longest),) = rng.choices(ranges, shares)
        length = min(rng.randint(shortest, longest), tokens // 4, left)
        lengths.append(length)
        left -= length
    return lengths


def bounds(mask: str, length: int) -> tuple[Tensor, Tensor]:
    """First key and end key of each row, int32 ``[length]``."""
    row = torch.arange(length)
    lengths = torch.tensor(document_lengths(length))
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    end = lengths.cumsum(0)[document]
    begin = end - lengths[document]
    zero = torch.zeros_like(row)
    lo, hi = {
        "full": (zero, zero + length),
        "causal": (zero, row + 1),
        "varlen_full": (begin, end),
        "varlen_causal": (begin, row + 1),
        "sw_causal": ((row - WINDOW + 1).clamp(min=0), row + 1),
        "varlen_block_causal": (begin, torch.minimum(begin + ((row - begin) // BLOCK + 1) * BLOCK, end)),
    }[mask]
    return lo.int(), hi.int()


def mask_plan(mask: str, length: int) -> MaskPlan:
    """The plan on the GPU, with its outline, as calls have it."""
    lo, hi = (x.cuda().view(1, 1, 1, length) for x in bounds(mask, length))
    return MaskPlan(RowIntervals(lo, hi, length)).with_outline()


def attention_tensors(length: int, heads: int, kv_heads: int, dims: tuple[int, int]) -> tuple[Tensor, ...]:
    """q, k, v ``[1, heads, length, dim]`` and the gradient of the output, bfloat16 on the GPU.

    Args:
        dims: of queries and keys, and of values.
    """
    torch.manual_seed(0)
    sizes = ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]), (heads, dims[1]))
    return tuple(torch.randn(1, n, length, dim, device="cuda", dtype=torch.bfloat16) for n, dim in sizes)


def many_documents(tokens: int, documents: int) -> RowIntervals:
    """Causal attention inside each of so many documents; their lengths differ by one at most."""
    row = torch.arange(tokens)
    begin = (row * documents // tokens * tokens + documents - 1) // documents
    return RowIntervals.build(begin.int().view(1, 1, 1, -1), row.int().view(1, 1, 1, -1) + 1, tokens)


def shared_prefixes(tokens: int, group: int, prompt: int, response: int) -> RowIntervals:
    """Groups of ``group`` tokens: a causal prompt, and responses that attend to it and, causally, to themselves.

    Each response is two rectangles of pairs, one of them a triangle.
    """
    row = torch.arange(tokens)
    begin = row // group * group
    place = row - begin
    own = torch.where(place < prompt, begin, begin + prompt + (place - prompt).clamp(min=0) // response * response)
    starts = torch.stack((begin, own)).int()
    ends = torch.stack((torch.where(place < prompt, begin, begin + prompt), row + 1)).int()
    return RowIntervals.build(starts[None, None], ends[None, None], tokens)
