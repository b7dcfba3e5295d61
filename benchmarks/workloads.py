"""Document lengths that the benchmarks share."""

from __future__ import annotations

import random

from magi_flex.distributed.workloads import LONG_CONTEXT_CORPUS


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
