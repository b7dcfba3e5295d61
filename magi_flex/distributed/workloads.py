"""Packed documents for the simulator, benchmarks and tests: lengths drawn from a distribution, and their mask."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import torch

from magi_flex.intervals import RowIntervals

# (shortest, longest, documents) of each bin: documents of a long-context training corpus.
LONG_CONTEXT_CORPUS = (
    (1, 10, 30254),
    (11, 50, 391188),
    (51, 100, 699596),
    (101, 200, 1377757),
    (201, 500, 3794735),
    (501, 1024, 3316785),
    (1025, 2048, 2106566),
    (2049, 4096, 988525),
    (4097, 8192, 410002),
    (8193, 16384, 173574),
    (16385, 32768, 115007),
    (32769, 65536, 18428),
    (65537, 131072, 22513),
    (131073, 196608, 18284),
)
LengthBins = tuple[tuple[int, int, int], ...]


def read_length_bins(path: str | Path) -> LengthBins:
    """Bins from a CSV file with columns ``range`` ("[shortest, longest]") and ``number``.

    Raises:
        ValueError: a row that is not of that form.
    """
    bins = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            try:
                low, high = row["range"].strip("[] ").split(",")
                bins.append((max(1, int(low)), int(high), int(row["number"])))
            except (KeyError, ValueError, AttributeError) as error:
                raise ValueError(f'{path}: row {row} needs range "[shortest, longest]" and number') from error
    return tuple(bins)


def draw_document_lengths(total: int, seed: int, bins: LengthBins = LONG_CONTEXT_CORPUS) -> list[int]:
    """Random document lengths that fill ``total`` tokens; the last document is cut off."""
    rng = random.Random(seed)
    weights = [number for _, _, number in bins]
    lengths: list[int] = []
    while total > 0:
        low, high, _ = rng.choices(bins, weights)[0]
        lengths.append(min(rng.randint(low, high), total))
        total -= lengths[-1]
    return lengths


def document_mask(lengths: list[int], causal: bool = True, window: int | None = None) -> RowIntervals:
    """Packed documents of these lengths; causal or not, at most ``window`` keys back where that is given."""
    length_N = torch.tensor(lengths, dtype=torch.int32)
    total = int(length_N.sum())
    end_N = length_N.cumsum(0, dtype=torch.int32)
    row_Q = torch.arange(1, total + 1, dtype=torch.int32)
    start_Q = torch.repeat_interleave(end_N - length_N, length_N)
    end_Q = row_Q if causal else torch.repeat_interleave(end_N, length_N)
    if window is not None:
        start_Q = torch.maximum(start_Q, row_Q - window)
    return RowIntervals(start_Q.view(1, 1, 1, total), end_Q.view(1, 1, 1, total), total)
