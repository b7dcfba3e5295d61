"""Score mods: every one of the shared cases, compiled and eager, with the gradients of what they capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import magi_flex
from inductor_lowering.score_analysis import recognise
from inductor_lowering.tile_program import score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex.kernels import route
from tests.cases.masks import make_mask
from tests.cases.reference import assert_within_factor, dense_attention, dense_attention_with_gradients
from tests.cases.score_mods import SCORE_MODS, make_score_mod
from tests.compiling import attend, check_training, qkv

_cpu = route.load("cpu")
CPU = None if isinstance(_cpu, str) or _cpu.missing(torch.device("cpu")) else "cpu"  # needs a compiler


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


# ---- recognised steps -----------------------------------------------------------------------------------------------

RECOGNISED = {
    "identity": [],
    "softcap": ["softcap"],
    "alibi": ["distance"],
    "alibi_causal": ["distance"],
    "decay": ["distance"],
    "relative_table": ["read"],
    "t5": ["table"],
    "pair_bias": ["read"],
    "query_dependent_bias": ["read"],
    "key_bias": ["read"],
    "log_gates": ["read", "read"],
}


def recipe_of(score_mod: Any, captures: list[Tensor] | None = None) -> Any:
    """The recipe of ``score_mod(score, b, h, q, k, *captures)``, as a compiled graph would have it."""
    scalars = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
    with item_access_as_index():
        graph = make_fx(score_mod, tracing_mode="fake", _allow_non_fake_inputs=True)(*scalars, *(captures or ()))
    return recognise(score_program(graph), "t" * len(captures or ()))


@pytest.mark.parametrize("name", sorted(SCORE_MODS))
def test_what_is_recognised(name: str) -> None:
    case = make_score_mod(name, 2, 4, 33, 70)
    names = sorted(case.captures)

    def lifted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captures: Tensor) -> Tensor:
        return case.bind(dict(zip(names, captures, strict=True)))(score, b, h, q, k)

    recipe = recipe_of(lifted, [case.captures[n].detach() for n in names])
    assert (None if recipe is None else [step[0] for step in recipe]) == RECOGNISED.get(name)


SLOPES, TABLE, GATES = torch.rand(4) + 0.1, torch.randn(4, 200), torch.randn(2, 80)
COMPOSITIONS: dict[str, Any] = {
    "scale, softcap, alibi": lambda s, b, h, q, k: 30 * torch.tanh(s * 2.0 / 30) - SLOPES[h] * (q - k).abs(),
    "softcap of a sum": lambda s, b, h, q, k: torch.tanh((s + TABLE[h, q - k + 90]) / 5) * 5,
    "tanh alone": lambda s, b, h, q, k: torch.tanh(s) + 1.5,
    "slopes by formula": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "slope for all": lambda s, b, h, q, k: s - 0.05 * (q - k),
    "clipped distance": lambda s, b, h, q, k: s - 0.1 * (q - k).clamp(min=0, max=20).float() * (b + 1),
    "transposed table": lambda s, b, h, q, k: s + 2 * TABLE.T[k + 3, h] - TABLE[h, 5],
    "strided index": lambda s, b, h, q, k: (s + TABLE[h, 2 * q]) / 2,
    "two axes apart": lambda s, b, h, q, k: s + (GATES[b, q] - GATES[b, k]) * 0.5,
    "negative index": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "minus the score": lambda s, b, h, q, k: 1 - s,
    "score taken away thrice": lambda s, b, h, q, k: torch.rsub(torch.rsub(s, 1.0, alpha=3), SLOPES[h], alpha=2),
    "multiples added": lambda s, b, h, q, k: torch.sub(torch.add(s, SLOPES[h], alpha=3), TABLE[h, q], alpha=2),
    "tables taken away": lambda s, b, h, q, k: s + torch.log(q + 1.0) - (q - k).abs().float().sqrt(),
    "indices taken away": lambda s, b, h, q, k: torch.tanh((s + True - (q + 2 * h)) / 40) * 40,
    "captured scalar added": lambda s, b, h, q, k: s + SLOPES.sum(),
}


@pytest.mark.parametrize("name", sorted(COMPOSITIONS))
def test_compositions(name: str) -> None:
    """Recognised, served natively, and the same as the general program."""
    score_mod = COMPOSITIONS[name]
    assert recipe_of(score_mod) is not None
    inputs = qkv(q_len=33, kv_len=70)
    check_training(attend, inputs, None, None, score_mod, floor=2e-6)
    exact = dense_attention(*inputs, None, score_mod).out
    near = dense_attention(*inputs, None, score_mod, dtype=torch.float32).out
    native = attend(*inputs, score_mod, kernel_options={"magi_backend": CPU}) if CPU else exact
    assert_within_factor(native, near, exact, floor=2e-6)


@pytest.mark.parametrize("function", [attend, torch.compile(attend, fullgraph=True)], ids=["eager", "compiled"])
def test_gradient_formulas_in_place_and_fused(function: Any) -> None:
    """Autograd's formulas of clamp and maximum write in place, no side effect of the mod; others are one op."""
    table = torch.randn(4, 33, requires_grad=True)
    exact = table.detach().double().requires_grad_()

    def bind(table: Tensor) -> Any:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            clipped = torch.maximum(s.clamp(-0.5, 0.5) * 3, table[h, q].clamp(min=-1))
            gates = functional.leaky_relu(s) * functional.logsigmoid(table[h, k]) + functional.hardtanh(s * 2)
            shrunk = functional.hardshrink(s) * functional.softshrink(table[h, q], 0.1)
            return functional.softplus(clipped) + gates + functional.elu(s) + shrunk

        return score_mod

    lengths = {"q_len": 33, "kv_len": 20}
    check_training(function, qkv(**lengths), None, None, bind(table), bind(exact), [table], [exact], floor=2e-6)


def test_chained_index() -> None:
    """table[h][q] indexes a row first; its gradient is scattered twice."""
    table = torch.randn(4, 33, 70, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    check_training(
        torch.compile(attend, fullgraph=True),
        qkv(q_len=33, kv_len=70),
        None,
        None,
        lambda s, b, h, q, k: s + table[h][q, k],
        lambda s, b, h, q, k: s + exact[h, q, k],
        [table],
        [exact],
        floor=2e-6,
        near_mod=lambda s, b, h, q, k: s + table[h, q, k],
    )


def test_gradients_are_those_of_the_joint_graph() -> None:
    """A straight-through estimator: rounding counts forward, but not backward."""
    q, k, v = qkv(q_len=20)

    def rounded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + (torch.round(score) - score).detach()

    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4
    right = rounded(scores, *[None] * 4).softmax(-1) @ v.repeat_interleave(2, 1)
    expected = torch.autograd.grad(right.square().sum(), (q, k, v))
    out = attend(q, k, v, rounded)
    torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, atol=1e-4, rtol=1e-4)


def test_a_table_that_covers_only_attended_pairs() -> None:
    """Out of bounds at masked pairs: no native steps, but the right result and gradient."""
    table = torch.randn(4, 600, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    case = make_mask("sliding_window", 700)
    block_mask = stock.create_block_mask(case.mask_mod, None, None, 700, 700, device="cpu")
    check_training(
        attend,
        qkv(batch=1, q_len=700),
        case.dense(),
        block_mask,
        lambda s, b, h, q, k: s + table[h, q - k],
        lambda s, b, h, q, k: s + exact[h, (q - k).clamp(0, 599)],
        [table],
        [exact],
        floor=2e-6,
        near_mod=lambda s, b, h, q, k: s + table[h, (q - k).clamp(0, 599)],
    )
