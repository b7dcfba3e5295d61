"""Document lengths and masks that the benchmarks share."""

from __future__ import annotations

import random

# Lengths of documents in a long-context training corpus: (shortest, longest) -> per cent of documents.
LENGTH_SHARES = {
    (1, 10): 0.22,
    (11, 50): 2.91,
    (51, 100): 5.2,
    (101, 200): 10.23,
    (201, 500): 28.19,
    (501, 1024): 24.64,
    (1025, 2048): 15.65,
    (2049, 4096): 7.34,
    (4097, 8192): 3.05,
    (8193, 16384): 1.29,
    (16385, 32768): 0.85,
    (32769, 65536): 0.14,
    (65537, 131072): 0.17,
    (131073, 196608): 0.14,
}


def document_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Lengths drawn from the distribution above until they fill ``tokens``; none is longer than a quarter of it.

    Raises:
        ValueError: ``tokens`` is below 4.
    """
    if tokens < 4:
        raise ValueError(f"tokens: {tokens} given, at least 4 are needed")
    rng = random.Random(seed)
    ranges, shares = list(LENGTH_SHARES), list(LENGTH_SHARES.values())
    lengths: list[int] = []
    left = tokens
    while left > 0:
        ((shortest, longest),) = rng.choices(ranges, shares)
        length = min(rng.randint(shortest, longest), tokens // 4, left)
        lengths.append(length)
        left -= length
    return lengths
