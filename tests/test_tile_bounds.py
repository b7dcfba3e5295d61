"""Interval arithmetic on masks: what it says of a tile is true, and it spares the evaluation of most tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.formula import Formula, Opaque
from inductor_lowering.mask_program import MaskProgram
from inductor_lowering.separate import separate
from inductor_lowering.tile_bounds import TileBounds
from inductor_lowering.to_intervals import plan_with_report
from inductor_lowering.words import WordEvaluator
from magi_flex import mods
from tests.cases.masks import MaskCase
from tests.random_masks import mask_cases

Q_TILE, KV_TILE = 8, 4


def by_tile(dense_BHQK: Tensor, missing: bool) -> Tensor:
    """``[B, H, T, C, Q_TILE * KV_TILE]``, filled up with ``missing``."""
    padding = (0, -dense_BHQK.shape[3] % KV_TILE, 0, -dense_BHQK.shape[2] % Q_TILE)
    padded = torch.nn.functional.pad(dense_BHQK, padding, value=missing)
    return padded.unflatten(3, (-1, KV_TILE)).unflatten(2, (-1, Q_TILE)).transpose(3, 4).flatten(4)


def check(case: MaskCase, whole: bool) -> tuple[Tensor, Tensor]:
    """Checks what is said of the mask (``whole``: by arithmetic alone); the shares of tiles that were found out."""
    traced, captures = trace_mask_mod(case.mask_mod)
    program = MaskProgram(traced, captures, case.batch, case.heads, case.q_len, case.kv_len, "cpu")
    formula: Formula = Opaque(program.result, False, "") if whole else separate(program)
    dense = case.dense().expand(case.batch, case.heads, -1, -1)
    some, every = by_tile(dense, False).any(-1), by_tile(dense, True).all(-1)
    tiles = TileBounds(program, Q_TILE, KV_TILE)
    middle = case.q_len // 2 // Q_TILE * Q_TILE
    parts = [tiles.classify(formula, rows) for rows in ((0, middle), (middle, case.q_len)) if rows[0] < rows[1]]
    rows = [part for part in (slice(0, middle // Q_TILE), slice(middle // Q_TILE, None)) if some[:, :, part].shape[2]]
    found = torch.zeros(2)
    for verdict, part in zip(parts, rows, strict=True):
        possible, certain = (x.expand(some[:, :, part].shape) for x in (verdict.possible, verdict.certain))
        assert not (some[:, :, part] & ~possible).any()
        assert not (certain & ~every[:, :, part]).any()
        found += torch.tensor([(~possible).sum(), certain.sum()])
    return found[0] / max(1, int((~some).sum())), found[1] / max(1, int(every.sum()))


@given(mask_cases())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_masks(case: MaskCase) -> None:
    check(case, whole=True)
    check(case, whole=False)


HALF = torch.arange(200) / 7.0
LARGE = torch.arange(200) + (1 << 24)
HUGE = torch.tensor(1 << 62)
HOLE = torch.ones(200).index_fill(0, torch.tensor(60), float("nan"))

# (mask, least shares of the empty and of the full tiles that are found)
MASKS: dict[str, tuple[Callable[..., Tensor], float, float]] = {
    "circle": (lambda b, h, q, k: (q - k) * (q - k) + (q // 10 - k // 10) ** 2 < 900, 0.8, 0.5),
    "distance of reals": (lambda b, h, q, k: ((HALF[q] - HALF[k]) ** 2).sqrt() < 5.0, 0.8, 0.5),
    "product": (lambda b, h, q, k: q * k > 5000, 0.9, 0.9),
    "clamped": (lambda b, h, q, k: ((q - k) * 3).clamp(-50, 50).abs() + q * 0 < 40, 0.6, 0.5),
    "remainder": (lambda b, h, q, k: (q + k) % 100 < 50, 0.5, 0.5),
    "where": (lambda b, h, q, k: torch.where(q > 100, q * k, q + k) > 300, 0.8, 0.8),
    "rounded to float": (lambda b, h, q, k: LARGE[q] * LARGE[k].float() > LARGE[k] * 16777300.0, 0.0, 0.0),
    "whole numbers as floats": (lambda b, h, q, k: LARGE[q] + k * 0 <= LARGE[k].float(), 0.0, 0.0),
    "overflow": (lambda b, h, q, k: HUGE * (q * k) + q > k, 0.0, 0.0),
    "small types": (lambda b, h, q, k: (q.to(torch.uint8) - k.to(torch.uint8)) * q.to(torch.uint8) > 100, 0.0, 0.0),
    "not a number, clamped": (lambda b, h, q, k: (HOLE[q] * HALF[k] + q * k).clamp(-1e6, 1e6) < 2e6, 0.0, 0.0),
    "not a number": (lambda b, h, q, k: ~((q - 50.0) * k).sqrt().isnan() & ((q - 50.0).sqrt() * k >= 0), 0.0, 0.0),
}


@pytest.mark.parametrize("name", sorted(MASKS))
def test_operators(name: str) -> None:
    mask_mod, empty, full = MASKS[name]
    for lengths in ((200, 150), (129, 200), (1, 5)):
        shares = check(MaskCase(name, mask_mod, 1, 1, *lengths, None), whole=True)
        if lengths[0] == 200:
            assert shares[0] >= empty and shares[1] >= full, shares


def test_tiles_that_are_known_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = 0
    evaluate = WordEvaluator.evaluate

    def counted(self: WordEvaluator, formula: Formula, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        nonlocal evaluated
        evaluated += (rows[1] - rows[0]) * (keys[1] - keys[0])
        return evaluate(self, formula, rows, keys)

    monkeypatch.setattr(WordEvaluator, "evaluate", counted)
    size = 4096
    mask_mod = MASKS["circle"][0]
    plan, report = plan_with_report(*trace_mask_mod(mask_mod), 1, 1, size, size)
    assert report.path == "stream" and evaluated < 0.3 * size * size
    q, k = torch.arange(size)[:, None], torch.arange(size)
    assert torch.equal(plan.to_dense()[0, 0], mask_mod(0, 0, q, k))


def test_captures_of_many_shapes() -> None:
    """What a program remembers of its calls does not grow with every length."""
    program, _ = trace_mask_mod(document_mask_mod(1))
    for length in range(1, 200):
        _, captures = trace_mask_mod(document_mask_mod(length))
        mask = MaskProgram(program, captures, 1, 1, length, length, "cpu")
        assert mask.steps[mask.result].dtype == torch.bool
    assert 1 < len(program.memo["calls"]) <= 64


def document_mask_mod(length: int) -> mods.MaskMod:
    return mods.document_causal(torch.arange(length))
