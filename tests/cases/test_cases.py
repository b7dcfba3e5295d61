"""The shared cases themselves: lengths, head and batch dependence, interval bounds, and the dense reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import dense_attention, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, make_score_mod


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("q_len,kv_len", [(1, 1), (5, 5), (129, 257), (257, 129), (1, 127), (127, 1)])
def test_mask_case(name: str, q_len: int, kv_len: int) -> None:
    case = make_mask(name, q_len, kv_len, seed=1)
    mask = case.dense()
    assert mask.shape == (case.batch, case.heads, q_len, kv_len) and mask.dtype == torch.bool
    assert torch.equal(mask, make_mask(name, q_len, kv_len, seed=1).dense())
    assert torch.equal(mask, create_mask(case.mask_mod, case.batch, case.heads, q_len, kv_len, device="cpu"))
    if case.max_intervals is not None:
        runs = torch.nn.functional.pad(mask.to(torch.int8), (1, 0)).diff(dim=-1).eq(1).sum(-1)
        assert runs.max() <= case.max_intervals


@pytest.mark.parametrize("name", sorted(set(MASKS) - {"full", "nothing"}))
def test_mask_case_is_not_trivial(name: str) -> None:
    mask = make_mask(name, 257).dense()
    assert mask.any() and not mask.all()
    assert mask.shape[0] == 1 or not torch.equal(mask[:1].expand_as(mask), mask)
    assert mask.shape[1] == 1 or not torch.equal(mask[:, :1].expand_as(mask), mask)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_case_gradients(name: str) -> None:
    """Reference gradients against finite differences of the same function."""
    torch.manual_seed(0)
    case = make_score_mod(name, batch=2, heads=2, q_len=5, kv_len=4)
    q, k, v = (torch.randn(2, n, s, 3, dtype=torch.float64) for n, s in ((2, 5), (1, 4), (1, 4)))
    mask = torch.rand(1, 1, 5, 4) < 0.7
    mask[:, :, 2] = False
    d_out, d_lse = torch.randn_like(q), torch.randn(2, 2, 5, dtype=torch.float64)
    captures = case.captures_as(torch.float64)
    learned = [captures[n] for n in case.learned]
    result = dense_attention_with_gradients(q, k, v, d_out, d_lse, mask, case.bind(captures), learned)
    assert (result.out[:, :, 2] == 0).all() and (result.lse[:, :, 2] == -math.inf).all()
    assert (result.dq[:, :, 2] == 0).all()

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        got = dense_attention(
            *leaves[:3], mask, case.bind({**captures, **dict(zip(case.learned, leaves[3:], strict=True))})
        )
        return (got.out * d_out).sum() + (got.lse * d_lse)[got.lse > -math.inf].sum()

    leaves = [q, k, v, *learned]
    direction = [torch.randn_like(x) for x in leaves]
    step = 1e-6
    with torch.no_grad():
        up = loss(*(x + step * d for x, d in zip(leaves, direction, strict=True)))
        down = loss(*(x - step * d for x, d in zip(leaves, direction, strict=True)))
    grads = [result.dq, result.dk, result.dv, *result.captures]
    along = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    torch.testing.assert_close(along, (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


def test_reference_without_keys() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 0, 4)
    result = dense_attention_with_gradients(q, k, k, torch.randn(1, 2, 3, 4))
    assert (result.out == 0).all() and (result.lse == -math.inf).all() and (result.dq == 0).all()
