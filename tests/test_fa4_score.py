"""Score mods as flash-attn-4's kernels would trace them, run on torch tensors inside the tiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import magi_flex
from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels import tiled_torch
from magi_flex.kernels.fa4_score import kernel_score
from magi_flex.kernels.fa4_trace import trace_forward
from magi_flex.kernels.fa4_walk import unknown_operators
from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreProgram, Softcap
from tests.cases.score_mods import SCORE_MODS
from tests.compiling import attend
from tests.test_score_program import check_case
from tests.torch_lanes import TorchLanes

LANES = TorchLanes()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The tiled kernel with traced score mods; yields the names of what was traced."""
    seen: list[str] = []
    unmodified = tiled_torch.Part.unmodified

    def places(part: Any, score: ScoreProgram, like: Tensor, rows: slice, keys: slice) -> list[Tensor]:
        return [x.int() for x in part._indices(score, like, rows, keys)]

    def modified(part: Any, score: ScoreProgram, scores: Tensor, mask: Any, rows: slice, keys: slice) -> Tensor:
        sizes = (2, 4, 1 << 20, 1 << 20)  # bounds of steps' tables, which are not made here
        kernel = None if score.is_identity else kernel_score(score, None, sizes, backward=False)
        if kernel is None:
            return scores
        seen.append("forward")
        result = kernel.forward(LANES, scores, places(part, score, scores, rows, keys), kernel.tables)
        assert result.dtype == torch.float32
        return result.expand(scores.shape)

    def gradient(
        part: Any,
        score: ScoreProgram,
        scores: Tensor,
        d_scores: Tensor,
        mask: Any,
        rows: slice,
        keys: slice,
        *rest: Any,
    ) -> Tensor:
        expected = unmodified(part, score, scores, d_scores, mask, rows, keys, *rest)  # captures' gradients as well
        kernel = None if score.is_identity else kernel_score(score, None, (2, 4, 9, 9), backward=True)
        if kernel is None:
            return expected
        assert kernel.backward is not None
        seen.append("backward")
        at = places(part, score, scores, rows, keys)
        return kernel.backward(LANES, d_scores, scores, at, kernel.tables).expand(scores.shape)

    monkeypatch.setattr(tiled_torch.Part, "modified", modified)
    monkeypatch.setattr(tiled_torch.Part, "unmodified", gradient)
    with magi_flex.enable(backend="tiled"):
        yield seen


# Hard masks become part of the plan: no score mod is left of them.
@pytest.mark.parametrize("name", sorted(set(SCORE_MODS) - {"identity", "hard_causal"}))
def test_every_score_mod(name: str, traced: list[str]) -> None:
    check_case(attend, name, 33, 70, "causal")
    assert {"forward", "backward"} <= set(traced)


def run_steps(steps: tuple[Any, ...], sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(score, result, d result, d score) of all places."""
    kernel = kernel_score(ScoreProgram(steps=steps), steps, sizes, backward=True)
    assert kernel is not None and kernel.backward is not None
    places = [
        torch.arange(n, dtype=torch.int32).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)
    ]
    score, grad = torch.randn(2, *sizes)
    result = kernel.forward(LANES, score, places, kernel.tables)
    return score, result, grad, kernel.backward(LANES, grad, score, places, kernel.tables)


def test_steps() -> None:
    sizes = batch, heads, q_len, kv_len = 2, 3, 5, 7
    slopes, table = torch.rand(heads), torch.randn(batch * heads * q_len * kv_len + 9)
    relative = torch.randn(heads, q_len + kv_len - 1).to(torch.bfloat16)
    steps = (
        Multiply(0.7),
        Softcap(1.5),
        Distance(slopes, True),
        Distance(torch.tensor([0.3]), False),
        Bias(table, (heads * q_len * kv_len, q_len * kv_len, kv_len, 1), 9, 2.0),
        Softcap(3.0),
        Bias(relative.flatten(), (0, q_len + kv_len - 1, 1, -1), kv_len - 1),
        Bias(relative.flatten(), (0, q_len + kv_len - 1, -1, 1), q_len - 1),
        Bias(table, (0, -2, 0, 3), 2 * heads),
        Bias(torch.tensor([0.25]), (0, 0, 0, 0), 0),
        Multiply(-1.5),
    )
    score, result, grad, d_score = run_steps(steps, sizes)
    x = score.double().requires_grad_()
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    q, k = torch.arange(q_len).view(-1, 1), torch.arange(kv_len)
    y = 1.5 * torch.tanh(0.7 * x / 1.5) + slopes[h].double() * (q - k).abs() + 0.3 * (k - q)
    y = 3 * torch.tanh((y + 2 * table.double()[9 + ((b * heads + h) * q_len + q) * kv_len + k]) / 3)
    y = y + relative[h, q - k + kv_len - 1].double() + relative[h, k - q + q_len - 1].double()
    y = -1.5 * (y + table.double()[2 * heads - 2 * h + 3 * k] + 0.25)
    torch.testing.assert_close(result.double(), y.detach(), atol=1e-5, rtol=1e-5)
    (expected,) = torch.autograd.grad(y, x, grad.double())
    torch.testing.assert_close(d_score.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_a_score_reads() -> None:
    def of(*steps: Any) -> Any:
        return kernel_score(ScoreProgram(steps=steps), steps, (1, 2, 3, 4), backward=False)

    assert of() is None
    assert not of(Multiply(2.0), Softcap(3.0)).reads_place
    distance, bias = Distance(torch.ones(2), True), Bias(torch.ones(12), (0, 0, 4, 1), 0)
    assert of(distance).reads_place and of(distance).relative and not of(distance, bias).relative
    keys = {of(*steps).key for steps in ([Softcap(3.0)], [Softcap(4.0)], [distance], [bias], [bias, distance])}
    assert len(keys) == 5 and of(Softcap(3.0)).key in keys
    other_contents = Distance(torch.zeros(2), True)
    assert of(other_contents).key == of(distance).key  # new values compile nothing


def program(*steps: Any) -> FxProgram:
    return FxProgram((*[["arg"] for _ in range(6)], *steps))


def test_what_cannot_be_traced_is_refused() -> None:
    def call(name: str, *args: Any) -> list[Any]:
        return ["call", f"aten::{name}", "Tensor", list(args), {}]

    score, key, capture = {"node": 0}, {"node": 4}, {"node": 5}
    for step, captured in (
        (call("erfinv", score), 1.0),
        (call("add", score, capture), torch.ones(3)),  # a whole tensor
        (call("add", score, capture), torch.ones((), dtype=torch.float64)),
        (call("index", capture, [key]), torch.ones(3, 3)),  # not in all dimensions
        (["sum", score], 1.0),
    ):
        with pytest.raises(UnsupportedProgram):
            trace_forward(program(step, ["return", {"node": 6}]), [captured])
        with pytest.raises(ValueError, match="score_mod: flash-attn-4's kernels cannot run it"):
            general = ScoreProgram(None, program(step, ["return", {"node": 6}]), captures=(captured,))
            kernel_score(general, None, (1, 1, 3, 3), backward=False)
    assert unknown_operators(frozenset({"aten::tanh", "aten::erfinv", "prims::convert_element_type"})) == [
        "aten::erfinv"
    ]


def test_captures_are_no_part_of_the_key() -> None:
    """Nor is arithmetic on captures alone, which torch does before the launch."""
    table = ["call", "aten::mul", "Tensor", [{"node": 5}, 2], {}]
    read = ["call", "aten::index", "Tensor", [{"node": 6}, [{"node": 4}]], {}]
    add = ["call", "aten::add", "Tensor", [{"node": 0}, {"node": 7}], {}]
    steps = program(table, read, add, ["return", {"node": 8}])
    first, second = (trace_forward(steps, [torch.full((size,), float(size))]) for size in (3, 5))
    assert first.key == second.key and second.tables[0].tolist() == [10.0] * 5
    places = [torch.arange(3, dtype=torch.int32)] * 4
    assert first(LANES, [torch.zeros(3), *places], first.tables).tolist() == [6.0] * 3
    doubles = trace_forward(steps, [torch.ones(3, dtype=torch.bfloat16)])
    assert doubles.key != first.key
