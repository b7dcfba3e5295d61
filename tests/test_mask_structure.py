"""Bands and packed documents, found from intervals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.mask_structure import Band, Documents, Structure, find_structure
from tests.cases.masks import MASKS, make_mask


def dense(structure: Structure, batch: int, q_len: int, kv_len: int) -> Tensor:
    """The mask [B, Q, K] as the structure's docstring says."""
    row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
    if isinstance(structure, Band):
        place = row + kv_len - q_len
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        if structure.left is not None:
            mask &= key >= place - structure.left
        if structure.right is not None:
            mask &= key <= place + structure.right
        return mask.expand(batch, -1, -1)
    number = torch.bucketize(torch.arange(batch * q_len), structure.bounds, right=True).view(batch, q_len)
    mask = number[:, :, None] == number[:, None, :]
    return mask & (key <= row) if structure.causal else mask


def found(mask_BQK: Tensor) -> Structure | None:
    return find_structure(RowIntervals.from_dense(mask_BQK[:, None]))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bands_are_found_whole(data: st.DataObject) -> None:
    q_len, kv_len = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    side = st.one_of(st.none(), st.integers(0, 45))
    band = Band(data.draw(side), data.draw(side))
    mask = dense(band, 2, q_len, kv_len)
    assert 2 * band.area(q_len, kv_len) == mask.sum()
    result = found(mask)
    if not mask.any(2).all():
        assert result is None  # rows that attend to nothing: no band
        return
    assert isinstance(result, (Band, Documents))
    assert torch.equal(dense(result, 2, q_len, kv_len), mask)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_documents_are_found_whole(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    cuts = [sorted(data.draw(st.sets(st.integers(1, length), max_size=6)) - {length}) for _ in range(batch)]
    bounds = torch.tensor([b * length + c for b, row in enumerate(cuts) for c in (0, *row)] + [batch * length])
    documents = Documents(bounds.int(), data.draw(st.booleans()), int(bounds.diff().max()))
    mask = dense(documents, batch, length, length)
    result = found(mask)
    assert result is not None and torch.equal(dense(result, batch, length, length), mask)
    if isinstance(result, Documents):
        assert torch.equal(result.bounds, documents.bounds) and result.longest == documents.longest
    else:
        assert not any(cuts) or length == 1 or set(map(len, cuts)) == {length - 1}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_what_is_found_is_the_mask(q_len: int, kv_len: int, seed: int) -> None:
    """Whatever the mask: a band with a few bits flipped is none any more."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randint(0, 6, (2,), generator=generator).tolist()
    mask = dense(Band(left, right), 1, q_len, kv_len).clone()
    mask ^= torch.rand(mask.shape, generator=generator) < 0.02
    result = found(mask)
    assert result is None or torch.equal(dense(result, 1, q_len, kv_len), mask)


@pytest.mark.parametrize("name", MASKS)
def test_patterns_that_people_use(name: str) -> None:
    for q_len, kv_len in ((57, 57), (30, 57)):
        case = make_mask(name, q_len, kv_len)
        mask = case.dense()
        result = find_structure(RowIntervals.from_dense(mask))
        if result is not None:
            assert torch.equal(dense(result, case.batch, q_len, kv_len)[:, None].expand_as(mask), mask)
        if q_len == kv_len and name in ("full", "causal", "sliding_window", "document", "document_causal"):
            assert result is not None


def test_names() -> None:
    full, causal = (found(dense(band, 1, 7, 9)) for band in (Band(None, None), Band(None, 0)))
    assert isinstance(full, Band) and full.is_full and not full.is_causal
    assert isinstance(causal, Band) and causal.is_causal and not causal.is_full
    assert find_structure(RowIntervals.full(0, 5)) is None
    assert find_structure(RowIntervals.full(5, 0)) is None
