"""Score mods: every one of the shared cases, compiled and eager, with the gradients of what they capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock

import magi_flex
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, make_score_mod
from tests.compiling import attend, check_training, qkv


@pytest.fixture(autouse=True)
def enabled(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with magi_flex.enable():
        yield
    assert not caplog.records  # nothing was left to PyTorch


def check_case(function: Any, name: str, q_len: int = 70, kv_len: int | None = None, mask: str | None = None) -> None:
    kv_len = q_len if kv_len is None else kv_len
    case = make_score_mod(name, batch=2, heads=4, q_len=q_len, kv_len=kv_len)
    exact = case.captures_as(torch.float64)
    block_mask = dense = None
    if mask is not None:
        mask_case = make_mask(mask, q_len, kv_len)
        dense = mask_case.dense()
        block_mask = stock.create_block_mask(mask_case.mask_mod, None, None, q_len, kv_len, device="cpu")
    check_training(
        function,
        qkv(q_len=q_len, kv_len=kv_len),
        dense,
        block_mask,
        case.score_mod,
        case.bind(exact),
        [case.captures[n] for n in case.learned],
        [exact[n] for n in case.learned],
        floor=2e-6,
    )


@pytest.mark.parametrize("name", sorted(SCORE_MODS))
def test_eager(name: str) -> None:
    check_case(attend, name, 33, 70, "causal")


def test_compiled() -> None:
    """All score mods in one graph."""
    q_len, kv_len = 33, 70
    cases = [make_score_mod(name, 2, 4, q_len, kv_len) for name in sorted(SCORE_MODS)]
    mask_case = make_mask("causal", q_len, kv_len)
    block_mask = stock.create_block_mask(mask_case.mask_mod, None, None, q_len, kv_len, device="cpu")
    mods = [case.score_mod for case in cases]
    function = torch.compile(
        lambda q, k, v, block_mask: [attend(q, k, v, mod, block_mask) for mod in mods], fullgraph=True, dynamic=True
    )
    q, k, v = qkv(q_len=q_len, kv_len=kv_len)
    outs = function(q, k, v, block_mask)
    d_outs = [torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(outs)]
    learned = [case.captures[n] for case in cases for n in case.learned]
    dq, dk, dv, *captured = torch.autograd.grad(outs, [q, k, v, *learned], d_outs)

    captures, sums = iter(captured), {}
    for case, out, d_out in zip(cases, outs, d_outs, strict=True):
        leaves = {dtype: case.captures_as(dtype) for dtype in (torch.float64, torch.float32)}
        exact, near = (
            dense_attention_with_gradients(
                *(q, k, v, d_out, None, mask_case.dense(), case.bind(leaf)),
                [leaf[n] for n in case.learned],
                dtype=dtype,
            )
            for dtype, leaf in leaves.items()
        )
        assert_within_factor(out, near.out, exact.out, floor=2e-6)
        for right, same in zip(exact.captures, near.captures, strict=True):
            assert_within_factor(next(captures), same, right, floor=2e-6)
        for name in ("dq", "dk", "dv"):
            sums.setdefault(name, []).append((getattr(near, name), getattr(exact, name)))
    for name, actual in (("dq", dq), ("dk", dk), ("dv", dv)):
        near, exact = (sum(part) for part in zip(*sums[name], strict=True))
        assert_within_factor(actual, near, exact, floor=2e-6)
