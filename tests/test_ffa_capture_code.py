"""The code that adds up the gradients of what score mods capture, compiled for the CPU, pair by pair against torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_flex import mods
from magi_flex.fx_program import ScatterAdd
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_capture_sums import _copies
from magi_flex.kernels.ffa_generated_score import generated_score
from magi_flex.kernels.request import IndexMap, Multiply, RequestFacts, ScoreProgram
from magi_flex.kernels.score_distance import Lengths
from tests.cases.score_mods import ScoreMod
from tests.cases.score_programs import traced_score
from tests.emulation.emulator import COMPILER
from tests.test_ffa_score_code import CPU, SIZES, _scores, compile_code, packed, places

BATCH, HEADS, Q_LEN, KV_LEN = SIZES
LONGEST = max(Q_LEN, KV_LEN)


def learned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(len(shape))
    return (torch.rand(shape) + 0.3).to(dtype).requires_grad_()


def relative(table: Tensor) -> ScoreMod:
    return mods.relative_table(table, KV_LEN - 1)


def cap(x: Tensor) -> ScoreMod:
    return lambda s, b, h, q, k: x[h] * torch.tanh(s / x[h])


# Each with the kinds of its sums.
LEARNED: dict[str, tuple[Callable[..., ScoreMod], tuple[Tensor, ...], str]] = {
    "temperature_per_head": (mods.temperature, (learned(HEADS, dtype=torch.bfloat16),), "head"),
    "query_temperature": (mods.query_temperature, (learned(Q_LEN),), "row"),
    "cap_per_head": (cap, (learned(HEADS),), "head head"),
    "alibi": (mods.alibi, (learned(HEADS),), "head"),
    "decay": (mods.decay, (learned(HEADS, dtype=torch.float64),), "head"),
    "log_gates_of_heads": (mods.log_gates, (learned(BATCH, HEADS, LONGEST, dtype=torch.float16),), "key row"),
    "relative_table": (relative, (learned(HEADS, Q_LEN + KV_LEN - 1),), "distance"),
    "t5": (lambda t: mods.t5_bias(t, 16), (learned(HEADS, 8),), "distance"),
    "pair_bias": (mods.pair_bias, (learned(BATCH, HEADS, Q_LEN, KV_LEN),), "pair"),
    "key_bias": (mods.key_bias, (learned(1, HEADS, KV_LEN),), "key"),
    "query_dependent_bias": (
        lambda x: mods.query_dependent_bias(x, Q_LEN - 1), (learned(BATCH, HEADS, Q_LEN, Q_LEN + KV_LEN - 1),), "pair"
    ),
    "separable_bias": (lambda *x: mods.separable_bias((3, 8), *x), (learned(5), learned(15)), "pair pair"),
    "chain": (
        lambda t, x: mods.chain(mods.temperature(t), mods.softcap(3.0), mods.alibi(x), mods.hard_mask(mods.causal())),
        (learned(), learned(HEADS)), "head head",
    ),
    "unused": (lambda used, unused: lambda s, b, h, q, k: s * used[h], (learned(HEADS), learned(3)), "head"),
    "shorter_than_needed": (lambda t: lambda s, b, h, q, k: s + t[q - k + 4] * t[k], (learned(11),), "key distance"),
}  # fmt: skip


def program(bind: Callable[..., ScoreMod], captures: tuple[Tensor, ...], **options: Any) -> ScoreProgram:
    return traced_score(bind, captures, learned=True, **options)


def in_torch(score: ScoreProgram, gradients: Tensor, inside: Tensor) -> list[Tensor | None]:
    """From the joint graph over whole tiles."""
    assert score.joint is not None
    arguments = [_scores(), *places(score.index_map), gradients, *score.captures]
    found = score.joint.run(arguments, CPU, torch.float32, inside)[5:]
    return [x.to_dense() if isinstance(x, ScatterAdd) else x for x in found]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_sums_mean_what_torch_means(tmp_path: Path) -> None:
    programs = {name: program(bind, captures) for name, (bind, captures, _) in LEARNED.items()}
    kinds = {name: kinds for name, (_, _, kinds) in LEARNED.items()}
    rows, keys = torch.randperm(Q_LEN), torch.randperm(KV_LEN)
    for name, kind in (("t5", "pair"), ("alibi", "head"), ("log_gates_of_heads", "key row")):
        programs[f"{name}_of_a_shard"] = program(*LEARNED[name][:2], index_map=IndexMap(0, 0, rows, keys))
        kinds[f"{name}_of_a_shard"] = kind
    wider = (learned(HEADS + 2, 8),)
    programs["later_heads"] = program(LEARNED["t5"][0], wider, index_map=IndexMap(1, 2))
    kinds["later_heads"] = "distance"
    kernels = {n: generated_score(x, CPU, True, Lengths(HEADS, Q_LEN, KV_LEN), 1) for n, x in programs.items()}
    library = compile_code(kernels, tmp_path)
    for name, score in programs.items():
        kernel = kernels[name]
        assert kernel.generated is not None and kernel.generated.has_sums
        for kind in ("head", "row", "key", "distance", "pair"):
            assert kernel.generated.text.count(f"SumKind::{kind}") == kinds[name].split().count(kind), name
        torch.manual_seed(0)
        given, gradients, inside = _scores(), torch.randn(SIZES), torch.ones(SIZES, dtype=torch.bool)
        if name == "shorter_than_needed":  # pairs that are masked may index out of bounds
            row, key = torch.arange(Q_LEN).view(-1, 1), torch.arange(KV_LEN)
            inside = ((row - key + 4 >= -11) & (row - key + 4 < 11) & (key < 11)).expand(SIZES)
            gradients = torch.where(inside, gradients, torch.nan)
        sizes = (ctypes.c_int * 4)(*SIZES)
        pointers = (ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(gradients.data_ptr()))
        getattr(library, f"add_up_{name}")(packed(kernel), *pointers, sizes)
        for found, expected, capture in zip(
            kernel.gradients(), in_torch(score, gradients, inside), score.captures, strict=True
        ):
            assert found is not None and found.dtype == capture.dtype and found.shape == capture.shape
            wanted = torch.zeros_like(capture) if expected is None else expected.expand(capture.shape).to(capture.dtype)
            torch.testing.assert_close(
                found, wanted, rtol=3e-3 if capture.dtype.itemsize == 2 else 1e-4, atol=1e-3,
                msg=lambda m, n=name: f"{n}: {m}",
            )  # fmt: skip


def test_only_wanted_gradients_are_summed() -> None:
    bind, captures, _ = LEARNED["chain"]
    score = program(bind, (captures[0].detach(), captures[1]))
    assert score.needs_grad == (False, True)
    kernel = generated_score(score, CPU, True, Lengths(HEADS, Q_LEN, KV_LEN), 1)
    assert kernel.generated is not None and "kSums = 1;" in kernel.generated.text
    first, second = kernel.gradients()
    assert first is None and second is not None
    # Nothing is kept for a forward pass, or where nothing is wanted.
    for other, backward in ((score, False), (replace(score, needs_grad=(False, False)), True)):
        code = generated_score(other, CPU, backward, Lengths(HEADS, Q_LEN, KV_LEN), 1).generated
        assert code is not None and not code.has_sums and "kSums = 0;" in code.text


def test_code_serves_any_number_of_heads() -> None:
    score = program(*LEARNED["t5"][:2])
    codes = {generated_score(score, CPU, True, Lengths(heads, Q_LEN, KV_LEN), 1).generated for heads in (1, HEADS)}
    (code,) = codes
    assert code is not None and "head.first * " in code.text


def test_small_tensors_have_copies() -> None:
    assert [_copies(n) for n in (0, 1, 127, 8192, 8193, 1 << 19, (1 << 19) + 1, 1 << 20, 1 << 40)] == [
        *(128, 128, 128, 128, 64, 2, 1, 1, 1)
    ]


def test_in_a_fixed_order_they_are_refused() -> None:
    facts = RequestFacts(torch.device("cuda"), torch.bfloat16, 64, 64, 8, 8, (Multiply,), True, True, False)
    assert FfaBackend().objections(facts) == []
    assert "in no fixed order" in FfaBackend().objections(replace(facts, deterministic=True))[0]
    assert FfaBackend().objections(replace(facts, deterministic=True, needs_backward=False)) == []
