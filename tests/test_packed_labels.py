"""Masks by labels without reading back: exact where labels stand in one run, and otherwise known not to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inductor_lowering import packed_labels
from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.packed_labels import LabelledIntervals, labelled_intervals, quick_intervals
from inductor_lowering.static_intervals import NotStatic, static_intervals
from magi_flex import mods
from magi_flex.op_specs import MaskSpec, split_captures
from tests.cases.masks import dense_mask
from tests.test_static_intervals import NothingIsReadBack

B, H, S = 2, 3, 37


def dense_labelled(found: LabelledIntervals) -> Tensor:
    return found.rest.to_dense() & (found.row_labels[..., None] == found.key_labels[:, :, None])


def packed(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


DOCUMENTS = packed(5, 1, 20, 11)
SHUFFLED = torch.tensor([7, -3, 12, 0])[DOCUMENTS].to(torch.int32)
PADDED = torch.where(torch.arange(S) % 9 == 0, -1, torch.arange(S) // 9)
BY_BATCH = torch.stack((DOCUMENTS, packed(30, 7)))
# (mask_mod, whether each label that counts stands in one run)
CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "documents": (mods.document(DOCUMENTS), True),
    "documents, causal": (mods.document_causal(DOCUMENTS), True),
    "ids in any order": (mods.document_causal(SHUFFLED), True),
    "a table for each batch entry": (lambda b, h, q, k: (k <= q) & (BY_BATCH[b, q] == BY_BATCH[b, k]), True),
    "a window in documents": (lambda b, h, q, k: (DOCUMENTS[k] == DOCUMENTS[q]) & (q - k < 4) & (k - q < 2 + h), True),
    "keys that no row asks for": (lambda b, h, q, k: DOCUMENTS[k] == DOCUMENTS[q] * 2, True),
    "padding that attends to nothing": (lambda b, h, q, k: (PADDED[q] >= 0) & (PADDED[q] == PADDED[k]), True),
    "padding that attends": (lambda b, h, q, k: (PADDED[q] == PADDED[k]) & (k <= q), False),
    "labels that return": (mods.document_causal(DOCUMENTS % 2), False),
    "two kinds of keys": (lambda b, h, q, k: (SHUFFLED[q] == DOCUMENTS[k]) & ((k < 3) | (k <= q)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_mask(name: str) -> None:
    mask_mod, in_runs = CASES[name]
    wanted = dense_mask(mask_mod, B, H, S, S)
    program, captures = trace_mask_mod(mask_mod)
    args = (program, captures, B, H, S, S, "cpu")
    labelled_intervals(*args)  # what follows from indices is known from now on
    with NothingIsReadBack():
        found = labelled_intervals(*args)
        intervals, holds = found.packed()
    assert torch.equal(dense_labelled(found).expand(B, H, S, S), wanted)
    assert bool(holds) == in_runs
    if in_runs:
        assert torch.equal(intervals.to_dense().expand(B, H, S, S), wanted)
    quick = quick_intervals(*args)
    assert (quick is not None) == in_runs
    if quick is not None:
        assert quick[1] == "packed labels" and torch.equal(quick[0].to_dense().expand(B, H, S, S), wanted)
    order, tensors, ints = split_captures(captures)
    shapes = MaskSpec(program.to_json(), order).labelled_shapes(tensors, ints, B, H, S, S)
    assert not isinstance(shapes, str) and shapes.intervals.starts.shape == intervals.starts.shape


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_any_labels(rows: list[int], keys: list[int]) -> None:
    row_ids, key_ids = torch.tensor(rows), torch.tensor(keys)
    program, captures = trace_mask_mod(lambda b, h, q, k: (row_ids[q] == key_ids[k]) & (k <= q + 2))
    found = labelled_intervals(program, captures, 1, 1, len(rows), len(keys), "cpu")
    dense = dense_mask(lambda b, h, q, k: (row_ids[q] == key_ids[k]) & (k <= q + 2), 1, 1, len(rows), len(keys))
    assert torch.equal(dense_labelled(found), dense)
    intervals, holds = found.packed()
    same = torch.equal(intervals.to_dense(), dense)
    returns = {x for x in keys if max(j for j, y in enumerate(keys) if y == x) - keys.index(x) + 1 > keys.count(x)}
    assert same or not bool(holds)
    assert bool(holds) or any(x in returns for x in rows)


OTHER_FORMS = {
    "0 equalities": lambda b, h, q, k: k <= q,
    "2 equalities": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (SHUFFLED[q] == SHUFFLED[k]),
    "captured values of the keys": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (SHUFFLED[k] < q),
    "0 equalities of labels": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) | (k <= q),
}


@pytest.mark.parametrize("reason", OTHER_FORMS)
def test_other_forms(reason: str) -> None:
    program, captures = trace_mask_mod(OTHER_FORMS[reason])
    with pytest.raises(NotStatic, match=reason):
        labelled_intervals(program, captures, 1, 1, S, S, "cpu")


def test_quick_intervals() -> None:
    """Masks of a known number of intervals need no labels; others are left to the rules that look."""
    for mask_mod, rule in ((mods.sink_window(2, 5), "static"), (lambda b, h, q, k: DOCUMENTS[k] > 1, None)):
        program, captures = trace_mask_mod(mask_mod)
        quick = quick_intervals(program, captures, 1, 1, S, S, "cpu")
        assert (None if quick is None else quick[1]) == rule
        if quick is not None:
            assert torch.equal(quick[0].to_dense(), dense_mask(mask_mod, 1, 1, S, S))


def test_refusals_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program at given lengths, with captures of given kinds; nothing else is taken for them."""
    tried: list[Any] = []

    def watched(*args: Any) -> Any:
        tried.append(args)
        return static_intervals(*args)

    monkeypatch.setattr(packed_labels, "static_intervals", watched)
    table = torch.rand(S, S) < 0.5
    program, captures = trace_mask_mod(lambda b, h, q, k: table[q, k])
    for other in (captures, (~table,)):
        assert quick_intervals(program, other, 1, 1, S, S, "cpu") is None and len(tried) == 1
    assert quick_intervals(program, captures, 1, 1, S, S - 1, "cpu") is None and len(tried) == 2
    assert quick_intervals(program, (table[:, : S - 2],), 1, 1, S, S - 2, "cpu") is None and len(tried) == 3
    ids = torch.arange(S) // 9
    program, captures = trace_mask_mod(lambda b, h, q, k: ids[q] == ids[k])
    assert quick_intervals(program, (ids.to("meta"),), 1, 1, S, S, "cpu") is None
    assert quick_intervals(program, captures, 1, 1, S, S, "cpu") is not None


def test_another_default_device() -> None:
    """Tensors are made where the mask lives, whatever torch.set_default_device says."""
    size = 41
    ids = torch.arange(size) // 9
    program, captures = trace_mask_mod(mods.document_causal(ids))
    with torch.device("meta"):
        quick = quick_intervals(program, captures, 1, 1, size, size, "cpu")
    assert quick is not None and torch.equal(
        quick[0].to_dense(), dense_mask(mods.document_causal(ids), 1, 1, size, size)
    )


def test_blocks_are_states() -> None:
    """With block lists the mask is: pairs by labels in partial blocks, all pairs in full ones."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(mods.document_causal(DOCUMENTS), None, None, S, S, "cpu", BLOCK_SIZE=16)
    program, captures = trace_mask_mod(mask.mask_mod)
    order, tensors, ints = split_captures(captures)
    spec = MaskSpec(program.to_json(), order, lists=True, full_lists=True)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    found = spec.labelled_mask([*lists, *tensors], [16, 16, *ints], 1, 1, S, S, torch.device("cpu"))
    assert bool(found.holds) and found.blocks is not None and found.blocks.shape == (1, 1, 3, 3)
    assert found.blocks[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    fewer = [lists[0].clamp(max=1), *lists[1:]]
    found = spec.labelled_mask([*fewer, *tensors], [16, 16, *ints], 1, 1, S, S, torch.device("cpu"))
    assert not bool(found.holds)
