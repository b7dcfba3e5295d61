"""Bad input: a clear error or the defined result, eager and compiled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor

import magi_flex
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import MaskPlan
from tests.cases.reference import dense_attention
from tests.compiling import attend, qkv


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with magi_flex.enable(), torch._dynamo.config.patch(recompile_limit=100), warnings.catch_warnings(action="ignore"):
        yield


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def mask(length: int = 20, mask_mod: Any = causal, batch: int | None = None, heads: int | None = None) -> Any:
    return stock.create_block_mask(mask_mod, batch, heads, length, length, device="cpu")


def our_mask(heads: int) -> Any:
    return magi_flex.create_block_mask(lambda b, h, q, k: q >= k + h, None, heads, 20, 20, "cpu")


def whole(mask_mod: Any) -> Any:
    """A BlockMask that is made without calling ``mask_mod``."""
    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return stock.BlockMask.from_kv_blocks(one, zero, mask_mod=mask_mod, seq_lengths=(20, 20))


TABLE = torch.randn(4, 20, 20)


def pieces(k: Any = None, v: Any = None) -> list[Tensor]:
    """Query, key and value, the latter two of calls with other sizes."""
    return [qkv(**{"q_len": 20, **(sizes or {})})[i] for i, sizes in enumerate((None, k, v))]


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "three dimensions": (lambda f: f(*(x[0] for x in pieces())), r"query: is \[4, 20, 16\]; \[batch, heads"),
    "head dims": (lambda f: f(*pieces(k={"dim": 8})), "same embedding dimension"),
    "key and value lengths": (lambda f: f(*pieces(v={"q_len": 21})), r"value: is \[2, 2, 21, 16\]; \[2, 2, 20, any\]"),
    "heads 4:3": (lambda f: f(*qkv(q_len=20, kv_heads=3)), "no multiple of the 3 heads"),
    "batch 2:3": (lambda f: f(*pieces(k={"batch": 3}, v={"batch": 3})), r"key: is \[3, .*\[2 or 1"),
    "integers": (lambda f: f(*(x.detach().int() for x in pieces())), "floating point dtype is needed"),
    "mask too long": (lambda f: f(*pieces(), None, mask(40)), "created for a larger length"),
    "mask too short": (lambda f: f(*pieces(), None, mask(10)), "created for a smaller length"),
    "mask batch": (lambda f: f(*pieces(), None, mask(batch=4)), "was made for B=4, but query has 2"),
    "mask heads": (lambda f: f(*pieces(), None, mask(heads=3)), "was made for H=3, but query has 4"),
    "our mask's heads": (lambda f: f(*pieces(), None, our_mask(heads=3)), "was made for H=3, but query has 4"),
    "mask device": (lambda f: f(*pieces(), None, mask().to("meta")), "same device"),
    "sliced mask": (lambda f: f(*pieces(), None, mask()[:, :, 0]), "sliced BlockMask"),
    "mask with a reduction": (lambda f: f(*pieces(), None, whole(lambda b, h, q, k: (q >= k).any())), "one pair"),
    "mask of floats": (
        lambda f: f(*pieces(), None, whole(lambda b, h, q, k: (q - k).float())),
        "bool tensor is needed",
    ),
    "softmax": (lambda f: f(*pieces(), lambda s, b, h, q, k: s.softmax(-1)), "sees one score"),
    "sort": (lambda f: f(*pieces(), lambda s, b, h, q, k: s.sort().values), "sees one score"),
    "random": (lambda f: f(*pieces(), lambda s, b, h, q, k: s + torch.rand_like(s)), "is random"),
    "not one score": (lambda f: f(*pieces(), lambda s, b, h, q, k: s + TABLE[h, q]), r"shape \(20,\); one score"),
    "branch on data": (lambda f: f(*pieces(), lambda s, b, h, q, k: s if q > k else s * 2), "(?i)data-dependent"),
    "index out of range": (lambda f: f(*pieces(), lambda s, b, h, q, k: s + TABLE[h, q, k + 5]), "out of bounds"),
    "unknown backend": (lambda f: f(*pieces(), kernel_options={"magi_backend": "fast"}), "allowed are auto, .*stock"),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_eager_errors(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        call(attend)


COMPILED = ("key and value lengths", "heads 4:3", "mask batch", "softmax", "not one score", "mask with a reduction")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_errors(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        call(torch.compile(attend, fullgraph=True))


def test_what_stock_cannot_compile_is_said() -> None:
    options = {"kernel_options": {"magi_backend": "stock"}}
    function = torch.compile(attend, fullgraph=True)
    with pytest.raises(Exception, match="a backward pass on a CPU is more than PyTorch itself can compile"):
        function(*pieces(), **options)
    with pytest.raises(Exception, match="the largest scores on a CPU is more than PyTorch itself can compile"):
        function(*qkv(q_len=20, grad=False), return_aux=stock.AuxRequest(max_scores=True), **options)


def test_a_capture_that_looks_like_a_handle() -> None:
    """int64 [1, 1, 4], the shape of the handle by which sharded sequences are known."""
    blocks = torch.tensor([[[1, 0, 1, 1]]])
    inputs = pieces()
    selected = magi_flex.plan(lambda b, h, q, k: blocks[0, 0, k // 5] == 1, 20, 20).to_dense()
    block_mask = whole(lambda b, h, q, k: blocks[0, 0, k // 5] == 1)
    torch.testing.assert_close(
        attend(*inputs, None, block_mask).double(), dense_attention(*inputs, selected).out, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("function", [attend, torch.compile(attend, fullgraph=True)], ids=["eager", "compiled"])
def test_side_effects_are_refused(function: Any) -> None:
    seen = torch.zeros(20)

    def counting(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen.add_(1)
        return s

    with pytest.raises(Exception, match="(?i)mutat|side.effect"):
        function(*pieces(), counting)
    assert (seen == 0).all()


@pytest.mark.parametrize("function", [attend, torch.compile(attend, fullgraph=True)], ids=["eager", "compiled"])
def test_double_backward_is_refused(function: Any) -> None:
    inputs = pieces()
    table = torch.randn(20, requires_grad=True)
    out = function(*inputs, lambda s, b, h, q, k: s + table[q])
    dq, d_table = torch.autograd.grad(out.square().sum(), (inputs[0], table), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()
    for first in (dq, d_table):
        for second in (*inputs, table):
            with pytest.raises(RuntimeError, match="double backward"):
                torch.autograd.grad(first.sum(), second)


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_keys_that_nobody_attends_to_may_hold_anything(backend: str) -> None:
    """Padding that was never written, in keys and values."""
    padded = magi_flex.create_block_mask(lambda b, h, q, k: k < 13, None, None, 20, 20, device="cpu")
    inputs = [x.detach() for x in pieces()]
    clean = attend(*inputs, None, padded)
    for bad in (math.nan, math.inf):
        q, k, v = (x.clone() for x in inputs)
        k[:, :, 13:], v[:, :, 13:] = bad, bad
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, None, padded, kernel_options={"magi_backend": backend})
        torch.testing.assert_close(out, clean)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), leaves))


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_non_finite_values_spread_to_the_rows_that_see_them(backend: str) -> None:
    q, k, v = (x.detach() for x in pieces())
    k[:, :, 12] = math.nan
    out = attend(q, k, v, None, mask(), kernel_options={"magi_backend": backend})
    assert out[:, :, 12:].isnan().all()
    right = attend(*(x.detach() for x in pieces()), None, mask())
    torch.testing.assert_close(out[:, :, :12], right[:, :, :12])


@pytest.mark.parametrize("sizes", [{"q_len": 0, "kv_len": 20}, {"q_len": 20, "kv_len": 0}, {"batch": 0, "q_len": 20}])
def test_empty_sizes(sizes: dict[str, int]) -> None:
    for function in (attend, torch.compile(attend, fullgraph=True)):
        inputs = qkv(**sizes)
        out = function(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
        assert out.shape == inputs[0].shape and (out == 0).all()
        assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, inputs, strict=True))


def test_dtypes_that_differ() -> None:
    """Keys and values in a lower precision than the query, which FlexAttention allows."""
    q, _, _ = pieces()
    _, k, v = pieces(k={"dtype": torch.bfloat16}, v={"dtype": torch.bfloat16})
    out = attend(q, k, v)
    torch.testing.assert_close(out, attend(q, k.float(), v.float()))
    assert out.dtype == torch.float32
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("shape", "plan_sizes", "message"),
    [
        ((1, 2, 9, 16), (2, 1, 9, 9), "block_mask: was made for B=2, but query has 1"),
        ((1, 2, 9, 16), (1, 4, 9, 9), "block_mask: was made for H=4, but query has 2"),
        ((1, 2, 9, 16), (1, 1, 8, 9), "block_mask: is for 8 queries and 9 keys"),
        ((1, 2, 9, 16), (1, 1, 9, 10), "block_mask: is for 9 queries and 10 keys"),
        ((3, 2, 9, 16), (1, 1, 9, 9), "key: has batch size 1; kernels need that of query, 3"),
    ],
)
def test_no_kernel_sees_a_plan_for_other_sizes(
    shape: tuple[int, ...], plan_sizes: tuple[int, int, int, int], message: str
) -> None:
    batch, heads, q_len, kv_len = plan_sizes
    plan = MaskPlan.from_dense(torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool))
    keys = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match=message):
        AttentionRequest(torch.zeros(shape), keys, keys, plan, 1.0)
