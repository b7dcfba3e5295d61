"""Real text that every machine has: the Python standard library's own source files, as packed documents of bytes.

Shape legend: B batch, S sequence.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from magi_flex import mods

BEGIN = 256  # the token before a document's first byte
IGNORED = -100  # target of tokens that predict nothing (cross_entropy's default)


@dataclass(frozen=True)
class PackedBatch:
    """Documents laid end to end; the last one is cut at the end of the sequence and goes on in the next batch.

    Attributes:
        tokens, targets: int64 ``[1, S]``; a document's last token has no target.
        positions: int32 ``[1, S]``, counted from the document's start.
        documents: int32 ``[S]``, the number of the document each token belongs to: 0, 0, ..., 1, 1, ...
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor

    @property
    def count(self) -> int:
        return int(self.documents[-1]) + 1


def library_files() -> list[Path]:
    """The standard library's source files, without its tests and what was installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"no Python source files under {root}: this Python comes without its library's sources")
    return sorted(files)


def documents(seed: int) -> Iterator[list[int]]:
    """Endlessly: each file as a list of tokens, in an order drawn from the seed and drawn again after each pass."""
    rng = random.Random(seed)
    files = library_files()
    while True:
        rng.shuffle(files)
        for path in files:
            if content := path.read_bytes():
                yield [BEGIN, *content]


def packed_batches(seq_len: int, seed: int = 0) -> Iterator[PackedBatch]:
    """Endless batches of ``seq_len`` tokens, with other documents each time."""
    source = documents(seed)
    rest: list[int] = []
    while True:
        tokens: list[int] = []
        lengths: list[int] = []
        while len(tokens) < seq_len:
            document = rest or next(source)
            taken = document[: seq_len - len(tokens)]
            rest = document[len(taken) :]
            tokens += taken
            lengths.append(len(taken))
        yield _batch(torch.tensor(tokens), lengths)


def _batch(tokens_S: Tensor, lengths: list[int]) -> PackedBatch:
    documents_S, positions_S = mods.documents_from_lengths(lengths)
    targets_S = tokens_S.roll(-1)
    targets_S[torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return PackedBatch(tokens_S[None], targets_S[None], positions_S[None], documents_S)
