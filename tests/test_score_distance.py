"""Tables by distance and bounds of whole numbers: what kernels leave to torch, and what they need not check."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_flex import mods
from magi_flex.fx_program import FxProgram
from magi_flex.kernels import score_distance
from magi_flex.kernels.ffa_generated_score import generated_score
from magi_flex.kernels.score_distance import (
    PADDING,
    Lengths,
    by_distance,
    distance_costs,
    function_of_distance,
    gather,
)
from magi_flex.kernels.score_ranges import ranges
from magi_flex.kernels.score_split import SCORE_ARGUMENTS
from tests.cases.score_mods import ScoreMod
from tests.cases.score_programs import traced_score

CPU = torch.device("cpu")


def forward_of(mod: ScoreMod) -> FxProgram:
    program = traced_score(lambda: mod).forward
    assert program is not None
    return program


def pairs(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len, dtype=torch.int32)[:, None], torch.arange(kv_len, dtype=torch.int32)[None, :]


def buckets(q: Tensor, k: Tensor) -> Tensor:
    return mods.t5_buckets(q - k, 16, 20, True)


@functools.cache
def program_of_buckets() -> FxProgram:
    return forward_of(lambda s, b, h, q, k: s * buckets(q, k))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_values_by_distance(q_len: int, kv_len: int) -> None:
    program = program_of_buckets()
    costs = distance_costs(program, SCORE_ARGUMENTS)
    step = max(costs)  # the last one
    lengths = Lengths(1, q_len, kv_len)
    table = by_distance(function_of_distance(program, step), lengths, CPU)
    assert table.shape == (lengths.distances,)
    q, k = pairs(q_len, kv_len)
    assert torch.equal(table[q - k + lengths.first], buckets(q, k))
    assert lengths.first - (kv_len - 1) == PADDING == lengths.distances - 1 - (lengths.first + q_len - 1)


def test_what_depends_on_the_distance_alone() -> None:
    def found(mod: ScoreMod) -> bool:
        return len(distance_costs(forward_of(mod), SCORE_ARGUMENTS)) > 0

    assert found(lambda s, b, h, q, k: s + torch.exp(-(q - k).abs() * 0.1))
    assert found(lambda s, b, h, q, k: s + ((2 + k) - q).float())
    for other in (
        lambda s, b, h, q, k: s + torch.exp(-(q + k) * 0.1),
        lambda s, b, h, q, k: s + torch.exp(-(q + q - k) * 0.1),
        lambda s, b, h, q, k: s + (q - h).float(),
        lambda s, b, h, q, k: s + torch.add(q, k, alpha=-2),
        lambda s, b, h, q, k: s + (q.float() - k.float()),  # rounded before it is subtracted
    ):
        assert not found(other)


@pytest.mark.parametrize("pack", [1, 2, 4])
def test_gather(pack: int) -> None:
    """Of a table that is too short on one side (NaN) and reached from its end on the other."""
    lengths, offset = Lengths(4, 9, 7), 1
    captured = torch.randn(5, 8, dtype=torch.bfloat16)
    distance = function_of_distance(*last_of_distance(lambda s, b, h, q, k: s + (q - k - 3).float()))
    table = gather((None, distance), tuple(captured.shape), lengths, offset, pack, CPU).of(captured)
    assert table.shape == (4 // pack, lengths.distances, pack)
    q, k = pairs(9, 7)
    index = (q - k - 3).long()
    for head in range(4):
        column = table[head // pack, :, head % pack]
        inside = (index >= -8) & (index < 8)
        expected = torch.where(inside, captured[head + offset, torch.where(inside, index, 0)], torch.nan)
        torch.testing.assert_close(column[q - k + lengths.first], expected, rtol=0, atol=0, equal_nan=True)
    assert not inside.all() and (index < 0).any()


def last_of_distance(mod: ScoreMod) -> tuple[FxProgram, int]:
    """The program and its step that is q - k with a number."""
    program = forward_of(mod)
    return program, [n for n, step in enumerate(program.steps) if step[0] == "call" and step[1] == "aten::sub"][1]


def test_forward_and_backward_read_their_own_captures() -> None:
    """Steps have other numbers in the gradient's graph; tables of one capture must not be taken for another's."""

    def bind(first: Tensor, second: Tensor) -> ScoreMod:
        return lambda s, b, h, q, k: s * first[h, q - k + 4] + second[h, q - k + 4]

    first, second = torch.randn(2, 9), torch.randn(2, 9)
    score = traced_score(bind, (first, second))
    for backward, wanted in ((False, [first, second]), (True, [first, second])):
        tables = generated_score(score, CPU, backward, Lengths(2, 5, 5), 1).tables
        given = [table[:, PADDING:-PADDING, 0] for table in tables]
        assert len(given) == 2 and all(torch.equal(x, y) for x, y in zip(given, wanted, strict=True))


def test_nothing_that_is_constant_is_built_again() -> None:
    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * mods.t5_buckets(q - k, 16, 20, False) + torch.tensor([0.5, 1.0, -2.0])[(q + k) % 3]

    score = traced_score(lambda: mod)
    first, second = (generated_score(score, CPU, False, Lengths(2, 5, 6), 1) for _ in range(2))
    assert len(first.tables) == 2
    assert all(x is y for x, y in zip(first.tables, second.tables, strict=True))


def test_constants_are_no_part_of_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    program = forward_of(lambda s, b, h, q, k: s + torch.tensor([0.5, 1.0])[q % 2])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the same call once before the graph is captured"):
        program.run([torch.zeros(())] * 5, torch.device("cuda"))


def test_what_a_cuda_graph_reads_outlives_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses: tables of other lengths must not push out what it reads."""
    gpu, capturing = torch.device("cuda", 0), [False]
    monkeypatch.setattr(score_distance, "constant_on", lambda device, data: data)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    function = function_of_distance(*last_of_distance(lambda s, b, h, q, k: s + (q - k - 3).float()))

    def find(length: int) -> list[weakref.ref[Tensor]]:
        lengths = Lengths(2, length, length)
        read = gather((None, function), (2, 90), lengths, 0, 1, gpu)
        return [weakref.ref(x) for x in (by_distance(function, lengths, gpu), *read.indices)]

    before, in_graph = find(1), find(2)
    capturing[0] = True
    assert [x() for x in find(2)] == [x() for x in in_graph]
    capturing[0] = False
    for length in range(3, 40):
        find(length)
    assert all(x() is None for x in before) and not any(x() is None for x in in_graph)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bounds_hold(data: st.DataObject) -> None:
    q_len, kv_len, heads = (data.draw(st.integers(1, 9)) for _ in range(3))
    steps: list[object] = [["arg"] for _ in range(5)]
    known = [2, 3, 4]
    two = ("add", "sub", "rsub", "mul", "maximum", "minimum", "remainder", "floor_divide")
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from((*two, "neg", "abs", "clamp")))
        x, y = ({"node": data.draw(st.sampled_from(known))} for _ in range(2))
        number = data.draw(st.integers(1, 5) if name in ("remainder", "floor_divide") else st.integers(-5, 5))
        if name in ("neg", "abs"):
            step = ["call", f"aten::{name}", "default", [x], {}]
        elif name == "clamp":
            low, high = data.draw(st.none() | st.integers(-5, 5)), data.draw(st.none() | st.integers(-5, 5))
            step = ["call", "aten::clamp", "default", [x, 0 if low is high is None else low, high], {}]
        elif name in ("maximum", "minimum"):
            step = ["call", f"aten::{name}", "default", [x, y], {}]
        else:
            scalar = data.draw(st.booleans()) or name in ("remainder", "floor_divide")
            overload = "Scalar" if scalar else "Tensor"
            step = ["call", f"aten::{name}", overload, [x, number if scalar else y], {}]
        steps.append(step)
        known.append(len(steps) - 1)
    program = FxProgram(tuple(steps))
    bounds = ranges(program, {2: (0, heads - 1), 3: (0, q_len - 1), 4: (0, kv_len - 1)})
    places = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (heads, q_len, kv_len)), indexing="ij")
    for step in known:
        values = program.ending_at(step).run([None, None, *places], CPU)
        low, high = bounds[step]
        assert low <= int(values.min()) and int(values.max()) <= high
