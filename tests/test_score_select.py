"""Score mods that give minus infinity outside of a condition: the condition becomes part of the mask, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import magi_flex
from inductor_lowering.score_select import split_selection
from inductor_lowering.tile_program import score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex import ops
from magi_flex.kernels.request import AttentionRequest
from tests.compiling import attend, check_training, qkv

INF = math.inf
LENGTHS = (129, 150)  # queries and keys
DOCUMENTS = torch.arange(150) // 37
HEAD_SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FEW = torch.tensor(5)
BIAS = torch.randn(4, 129, generator=torch.Generator().manual_seed(0))


def causal(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, s, -INF)


def excluded(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q < k, -INF, s)


def filled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s.masked_fill((q < k) | (DOCUMENTS[q] != DOCUMENTS[k]), -INF)


def filled_with_tensor(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s.masked_fill(q < k, torch.tensor(-INF))


def tensor_constant(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, s, torch.full_like(s, -INF))


def last(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where((q - k).abs() < 20, 20 * torch.tanh((s + BIAS[h, q]) / 20) + HEAD_SLOPES[h] * (k - q), -INF)


def first(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, s, -INF) * 0.5 + 3


def twice(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    s = torch.where(q >= k, s, -INF)
    return torch.where(DOCUMENTS[q] == DOCUMENTS[k], s, -INF)


def by_head(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where((h % 2 == 0) | (b == 0) & (q >= k), s, -INF)


def captured_limit(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q - k >= FEW, s, -INF)  # the first rows attend to nothing


SELECTIONS = {
    f.__name__: f
    for f in (
        *(causal, excluded, filled, filled_with_tensor, tensor_constant),
        *(last, first, twice, by_head, captured_limit),
    )
}


def of_score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(s > 0, s, -INF)


def finite(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, s, -1e9)


def softcapped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * torch.tanh(torch.where(q >= k, s, -INF) / 20)


def added(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + torch.where(q >= k, 0.0, -INF)


def then_a_table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, s, -INF) + HEAD_SLOPES[h]


OTHERS = {f.__name__: f for f in (of_score, finite, softcapped, added, then_a_table)}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[AttentionRequest]:
    seen: list[AttentionRequest] = []
    run = ops.route

    def watched(facts: Any, choice: str = "auto") -> Any:
        backend = run(facts, choice)

        class Watched:
            def forward(self, request: AttentionRequest) -> Any:
                seen.append(request)
                return backend.forward(request)

            def backward(self, request: AttentionRequest, *args: Any) -> Any:
                seen.append(request)
                return backend.backward(request, *args)

        return Watched()

    monkeypatch.setattr(ops, "route", watched)
    return seen


def attended(score_mod: Callable[..., Any]) -> Tensor:
    """Dense [B, H, Q, K] where the score mod does not give minus infinity."""
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(1, 4, 1, 1)
    q, k = torch.arange(LENGTHS[0]).view(-1, 1), torch.arange(LENGTHS[1])
    score = torch.zeros(2, 4, *LENGTHS)
    return torch.as_tensor(score_mod(score, b, h, q, k)) != -INF


COMPILED = ("filled", "first", "last", "tensor_constant")


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in sorted(SELECTIONS)), *((name, True) for name in COMPILED)]
)
def test_selections_become_the_mask(name: str, compiled: bool, requests: list[AttentionRequest]) -> None:
    score_mod = SELECTIONS[name]
    inputs = qkv(q_len=LENGTHS[0], kv_len=LENGTHS[1])
    with magi_flex.enable():
        function = torch.compile(attend, fullgraph=True) if compiled else attend
        check_training(function, inputs, attended(score_mod), score_mod=score_mod, near_mod=score_mod)
    assert len(requests) == 2
    for request in requests:
        dense = request.plan.to_dense().expand(2, 4, *LENGTHS)
        assert torch.equal(dense, attended(score_mod))
        assert request.score.steps is not None  # the rest runs in the fast kernels


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_no_selection_is_left_alone(name: str, requests: list[AttentionRequest]) -> None:
    score_mod = OTHERS[name]
    inputs = qkv(q_len=LENGTHS[0], kv_len=LENGTHS[1])
    with magi_flex.enable():
        check_training(attend, inputs, None, score_mod=score_mod, near_mod=score_mod)
    assert all(request.plan.area() == LENGTHS[0] * LENGTHS[1] for request in requests)


def windows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < 40


def dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 3 == 0


@pytest.mark.parametrize("mask_mod", [windows, dilated])
@pytest.mark.parametrize("create", [stock.create_block_mask, magi_flex.create_block_mask])
def test_together_with_a_block_mask(create: Any, mask_mod: Any, requests: list[AttentionRequest]) -> None:
    """Partial and full blocks of a stock mask, a canonical mask, one with bit tiles."""
    inputs = qkv(q_len=LENGTHS[0], kv_len=LENGTHS[1])
    block_mask = create(mask_mod, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=16)
    q, k = torch.arange(LENGTHS[0])[:, None], torch.arange(LENGTHS[1])
    dense = attended(filled) & mask_mod(0, 0, q, k)
    with magi_flex.enable():
        check_training(attend, inputs, dense, block_mask, filled, near_mod=filled)
    for request in requests:
        assert torch.equal(request.plan.to_dense().expand(2, 4, *LENGTHS), dense)
    assert mask_mod is windows or requests[0].plan.bit_tiles is not None


def test_rows_without_any_pair() -> None:
    inputs = qkv(q_len=20)
    with magi_flex.enable():
        out, lse = attend(*inputs, lambda s, b, h, q, k: torch.where(q > 7, s, -INF), return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse[:, :, 8:].sum(), inputs)
    assert (out[:, :, :8] == 0).all() and (lse[:, :, :8] == -INF).all() and out[:, :, 8:].ne(0).any(-1).all()
    assert (grads[0][:, :, :8] == 0).all() and all(grad.isfinite().all() for grad in grads)


def test_gradients_of_captures(requests: list[AttentionRequest]) -> None:
    table = torch.randn(4, 129, requires_grad=True)
    exact = table.detach().double().requires_grad_()

    def bind(table: Tensor) -> Any:
        return lambda s, b, h, q, k: torch.where(q >= k, s * 2 + table[h, q], -INF)

    with magi_flex.enable():
        check_training(attend, qkv(), None, None, bind(table), bind(exact), [table], [exact], floor=2e-6)
    assert all(request.plan.area() == 129 * 130 // 2 for request in requests)


def test_a_condition_that_reads_only_attended_pairs(requests: list[AttentionRequest]) -> None:
    """Elsewhere its table would be read out of bounds: the mod's graph selects, where the mask attends."""
    small = torch.arange(100) // 7
    block_mask = magi_flex.create_block_mask(lambda b, h, q, k: (q < 100) & (k < 100), None, None, 129, 129)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(small[q] == small[k], s, -INF)

    inputs = qkv()
    dense = torch.zeros(1, 1, 129, 129, dtype=torch.bool)
    dense[..., :100, :100] = small[:, None] == small
    with magi_flex.enable():
        check_training(attend, inputs, dense, block_mask, score_mod, lambda s, *i: s, near_mod=lambda s, *i: s)
    assert all(request.score.steps is None and request.plan.area() == 100 * 100 for request in requests)


def test_forward_backward_and_layers_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = 0
    build = ops.MaskSpec.build

    def counted(*args: Any) -> Any:
        nonlocal builds
        builds += 1
        return build(*args)

    monkeypatch.setattr(ops.MaskSpec, "build", counted)

    @torch.compile(fullgraph=True)
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = attend(q, k, v, filled)
        return q

    with magi_flex.enable():
        layers(*qkv()).sum().backward()
    assert builds == 1


# ---- splitting any program ------------------------------------------------------------------------------------------


@st.composite
def score_mods(draw: st.DrawFn) -> Callable[..., Any]:
    """Compositions of selections, of what keeps minus infinity, and of what does not."""
    conditions = (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q - k) % 3 != 1,
        lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    )
    steps: list[Callable[..., Any]] = []
    for _ in range(draw(st.integers(1, 5))):
        c = conditions[draw(st.integers(0, 2))]
        x = draw(st.sampled_from([-2.0, -1.0, 0.5, 3.0]))
        steps.append(
            draw(
                st.sampled_from(
                    [
                        lambda s, *i, c=c: torch.where(c(*i), s, -INF),
                        lambda s, *i, c=c: torch.where(c(*i), -INF, s),
                        lambda s, *i, c=c: s.masked_fill(c(*i), -INF),
                        lambda s, *i, c=c, x=x: torch.where(c(*i), s, x),
                        lambda s, *i, c=c: torch.where(c(*i), s, INF),
                        lambda s, *i, x=x: s * x,
                        lambda s, *i, x=x: x - s,
                        lambda s, *i, x=x: s + x,
                        lambda s, *i, x=x: (s - x) / 2,
                        lambda s, *i: torch.tanh(s),
                        lambda s, *i: s.to(torch.float16).float(),
                        lambda s, *i: s + DOCUMENTS[i[2]],
                    ]
                )
            )
        )

    def score_mod(s: Any, *indices: Any) -> Any:
        for step in steps:
            s = step(s, *indices)
        return s

    return score_mod


@given(score_mods())
@settings(max_examples=40, deadline=None)
def test_both_halves_are_the_mod(score_mod: Callable[..., Any]) -> None:
    scalars = [torch.zeros(()), *(torch.zeros((), dtype=torch.int64) for _ in range(4))]
    with item_access_as_index():
        graph = make_fx(score_mod, tracing_mode="fake", _allow_non_fake_inputs=True)(*scalars)
    program = score_program(graph)
    selection = split_selection(program)
    index = torch.arange(150)
    args = [torch.randn(40, 150), torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), index[:40, None], index]
    args[0][3, 5], args[0][7, 6] = math.nan, INF
    whole = program.run(args, torch.device("cpu")).expand(40, 150)
    if selection is not None:
        condition = selection.condition.run(args[1:], torch.device("cpu")).expand(40, 150)
        rest = selection.rest.run(args, torch.device("cpu")).expand(40, 150)
        torch.testing.assert_close(torch.where(condition, rest, -INF), whole, equal_nan=True)
