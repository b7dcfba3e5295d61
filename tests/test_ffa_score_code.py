"""The code that score mods become for the Hopper kernels, compiled for the CPU, against torch; what is refused."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cuda_build import SOURCES
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_generated_score import generated_score
from magi_flex.kernels.ffa_score import KernelScore
from magi_flex.kernels.ffa_score_choice import scale_and_score
from magi_flex.kernels.request import AttentionRequest, Bias, IndexMap, Multiply, RequestFacts, ScoreProgram, Softcap
from magi_flex.kernels.score_distance import Lengths
from magi_flex.kernels.score_split import has_linear_gradient
from magi_flex.mask_plan import MaskPlan
from tests.cases.score_mods import SCORE_MODS, ScoreMod, make_score_mod
from tests.cases.score_programs import program_of_case, traced_score
from tests.emulation.emulator import COMPILER, HERE

SIZES = BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 17, 23
CPU = torch.device("cpu")


def _scores() -> Tensor:
    torch.manual_seed(0)
    scores = torch.randn(SIZES) * 2
    scores[0, 0, 0, :9] = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 30.0, -30.0])
    return scores


def _table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(shape).mul(9).to(dtype) if dtype != torch.bool else torch.rand(shape) < 0.5


def _gather(dtype: torch.dtype) -> tuple[Callable[..., ScoreMod], tuple[Tensor, ...]]:
    """Two tables of one dtype, with strides; arithmetic in that dtype."""
    tables = _table(HEADS, 40, dtype=dtype).T, _table(31, dtype=dtype)[::3]

    def bind(first: Tensor, second: Tensor) -> ScoreMod:
        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            x, y = first[q - k + 8, h], second[k % 7]
            if dtype == torch.bool:
                return torch.where(x & ~y, score, score * 2) + (x | y) + (x ^ y)
            return score + (x * y + x - y) + (x > y)

        return mod

    return bind, tables


def _mod(f: Callable[..., Any]) -> tuple[Callable[..., ScoreMod], tuple[Tensor, ...]]:
    return lambda: f, ()


CASES: dict[str, tuple[Callable[..., ScoreMod], tuple[Tensor, ...]]] = {
    f"gather_{str(dtype).removeprefix('torch.')}": _gather(dtype)
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
} | {
    "floor_and_remainder": _mod(
        lambda s, b, h, q, k: s + (q - k) // 3 + (k - q) // -4 + (q - k) % 5 + (q - k) % -6 + torch.fmod(q - k, 7)
    ),
    "float_division": _mod(
        lambda s, b, h, q, k: (
            s.detach() // 0.7 + (s.detach() - 0.25) // -0.5 + s % 0.7 + s % -1.5
            + torch.div(s, 0.3, rounding_mode="trunc")
        )
    ),
    "whole_numbers": _mod(
        lambda s, b, h, q, k: (
            s + ((q - k) ** 3 + (q << 2) + ((q - k) >> 1) + (q & 5) + (k | 3) + (q ^ k) + (~q) + torch.sign(q - k))
            + ((q + 2147483000) * 1000 > k) + torch.maximum(q, k) - torch.minimum(q - 5, k).abs() + q / 3
        )
    ),
    "functions": _mod(
        lambda s, b, h, q, k: (
            torch.exp(s * 0.1) + torch.exp2(s) * 1e-6 + torch.expm1(0.01 * s) + torch.log1p(s * s)
            + torch.log(s.abs() + 1) + torch.sin(s) + torch.cos(s) + torch.tanh(s) + torch.sigmoid(s) + torch.erf(s)
            + torch.rsqrt(1 + s * s) + torch.nn.functional.silu(s) + torch.nn.functional.softplus(s.detach())
            + torch.sqrt(s * s + 0.5) + torch.atan(s)
        )
    ),
    "bounds": _mod(
        lambda s, b, h, q, k: (
            s.detach().clamp(-1, 2) + s.clamp(max=2) + s.clamp(min=0.3) + torch.relu(s)
            + torch.where(s.isnan(), 0.0, s * 0.1)
        )
    ),
    "rounding": _mod(lambda s, b, h, q, k: s + torch.floor(s) + torch.ceil(s) + torch.round(s) + torch.trunc(s)),
    "tanh": _mod(lambda s, b, h, q, k: torch.tanh(s * (0.02 * q + 0.005 * k)) + 0.0 * s),
    # One unit in the last place would be another block.
    "blocks": _mod(
        lambda s, b, h, q, k: s + ((q * 23 + k) / 7).floor() - torch.ceil((q + k) / 3) + q % 4 - (k - q) // 8 * h
    ),
    "powers": _mod(
        lambda s, b, h, q, k: s**2 + s**3 + (s.abs() + 1) ** 0.5 + (s.abs() + 1) ** -1.7 + (1 + s * s) ** -1
    ),
    "low_precision": _mod(lambda s, b, h, q, k: s + (q * 0.1).to(torch.bfloat16) * (k * 0.3).to(torch.float16)),
    # A number that is compared with a 16-bit float, or is one, is rounded first.
    "low_precision_numbers": (
        lambda t: lambda s, b, h, q, k: (
            s + (t[k] == 0.1) + 2.0 * (t[q] >= 0.3) + 4.0 * (0.7 < t[k]) + torch.where(k < 5, 0.1, t[k])
        ),
        (torch.tensor([0.1, 0.3, 0.7, 0.2] * 8, dtype=torch.bfloat16),),
    ),
    "hard": _mod(lambda s, b, h, q, k: torch.where((k <= q) & ((q - k < 9) | (k < 2)), s, -float("inf"))),
    "not_of_the_score": _mod(lambda s, b, h, q, k: (q - k).float() * 0.1 + h),
    "out_of_bounds": (lambda t: lambda s, b, h, q, k: s + t[q - k - 4], (_table(9),)),
    "numbers": (
        lambda x, n, flag: lambda s, b, h, q, k: torch.where(flag, s * x, s - n) + n // 2,
        (torch.tensor(0.3, dtype=torch.float64), torch.tensor(7), torch.tensor(True)),
    ),
    "autocast": (
        lambda t: lambda s, b, h, q, k: (s.to(torch.bfloat16) * t[h]).float(), (_table(HEADS, dtype=torch.bfloat16),)
    ),
}  # fmt: skip


def places(index_map: IndexMap) -> list[Tensor]:
    found = [
        torch.arange(n, dtype=torch.int32).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(SIZES)
    ]
    found[0], found[1] = found[0] + index_map.b_offset, found[1] + index_map.h_offset
    for axis, index in ((2, index_map.q_index), (3, index_map.k_index)):
        if index is not None:
            found[axis] = index.to(torch.int32).view(found[axis].shape)
    return found


def in_torch(score: ScoreProgram, program: FxProgram, *grad: Tensor) -> Tensor:
    """Where a table is read out of bounds, NaN."""
    values = [_scores(), *places(score.index_map)]
    inside = torch.ones(SIZES, dtype=torch.bool)
    if score.captures and score.captures[0].shape == (9,):
        distance = values[3] - values[4] - 4
        inside = ((distance >= -9) & (distance < 9)).expand(SIZES)
    result = program.run([*values, *grad, *score.captures], CPU, torch.float32, inside)
    value = torch.as_tensor(result if isinstance(result, Tensor) else result[0], dtype=torch.float32)
    return torch.where(inside, value, torch.nan)


def code_of(score: ScoreProgram, backward: bool, pack: int = 1) -> KernelScore:
    return generated_score(score, CPU, backward, Lengths(HEADS, Q_LEN, KV_LEN), pack)


def compile_code(kernels: dict[str, KernelScore], folder: Path) -> ctypes.CDLL:
    """For each mod ``run_NAME`` and ``add_up_NAME``, see tests/emulation/scores.cpp."""
    mods = []
    for name, kernel in kernels.items():
        assert kernel.generated is not None
        mods.append(
            kernel.generated.text.replace("GeneratedScore", f"Generated_{name}")
            + f'extern "C" void run_{name}(const void* p, const float* s, const int* n, float* r, float* d) '
            + f"{{ run<score_math::Generated_{name}>(p, s, n, r, d); }}\n"
            + f'extern "C" void add_up_{name}(const void* p, const float* s, const float* g, const int* n) '
            + f"{{ add_up<score_math::Generated_{name}>(p, s, g, n); }}\n"
        )
    (folder / "scores.cpp").write_text((HERE / "scores.cpp").read_text().replace("MODS", "\n".join(mods)))
    sources = [SOURCES / "ffa" / f"{name}.cuh" for name in ("score", "score_math", "descriptor")]
    for header in (HERE / "machine.h", HERE / "ptx.cuh", *sources):
        shutil.copy(header, folder)
    command = [str(COMPILER), *"-std=c++20 -O1 -ffp-contract=off -w -fPIC -shared scores.cpp -o scores.so".split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return ctypes.CDLL(str(folder / "scores.so"))


def packed(kernel: KernelScore) -> bytes:
    """The parameters of the mod's code."""
    assert kernel.generated is not None
    return struct.pack("<" + kernel.generated.format, *kernel.values)


def compile_mods(scores: dict[str, ScoreProgram], folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """(results, slopes) of the generated code of each program."""
    kernels = {name: code_of(score, True, 1 + number % 2) for number, (name, score) in enumerate(scores.items())}
    library, found = compile_code(kernels, folder), {}
    for name, kernel in kernels.items():
        given, result, slope = _scores(), torch.empty(SIZES), torch.empty(SIZES)
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (given, result, slope))
        at = next(pointers)
        getattr(library, f"run_{name}")(packed(kernel), at, (ctypes.c_int * 4)(*SIZES), *pointers)
        found[name] = result, slope
    return found


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_code_means_what_torch_means(tmp_path: Path) -> None:
    programs = {name: traced_score(bind, captures) for name, (bind, captures) in CASES.items()}
    for name in sorted(set(SCORE_MODS) - {"identity"}):
        programs[f"case_{name}"] = program_of_case(make_score_mod(name, BATCH, HEADS, Q_LEN, KV_LEN))
    rows, keys = torch.randperm(Q_LEN), torch.randperm(KV_LEN) - 9
    programs["shard"] = replace(
        traced_score(lambda: lambda s, b, h, q, k: s * (b + 1) - h * (q - k) % 5), index_map=IndexMap(3, 1, rows, keys)
    )
    found = compile_mods(programs, tmp_path)
    for name, score in programs.items():
        result, slope = found[name]
        assert score.forward is not None and score.joint is not None
        expected = in_torch(score, score.forward).expand(SIZES)
        tolerance = 3e-7 if name == "tanh" else 3e-6
        torch.testing.assert_close(
            result, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        derivative = in_torch(score, score.joint, torch.ones(SIZES)).expand(SIZES)
        inside = ~expected.isnan()
        torch.testing.assert_close(
            slope[inside], derivative[inside], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"slope of {n}: {m}"
        )


def test_new_contents_are_the_same_code() -> None:
    bind, captures = CASES["numbers"]
    score = traced_score(bind, captures)
    first = code_of(score, False)
    other = replace(score, captures=(torch.tensor(9.0, dtype=torch.float64), torch.tensor(1), torch.tensor(False)))
    second = code_of(other, False)
    assert first.generated is second.generated and first.values != second.values
    wider = replace(score, captures=(torch.tensor(9.0), *captures[1:]))
    assert code_of(wider, False).generated != first.generated


class Clipped(torch.autograd.Function):
    """Its backward is no derivative: it clips the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


def test_only_multiples_of_the_gradient() -> None:
    clipped = traced_score(lambda: lambda score, b, h, q, k: Clipped.apply(score))
    plain = traced_score(*CASES["functions"])
    assert clipped.joint is not None and plain.joint is not None
    assert not has_linear_gradient(clipped.joint) and has_linear_gradient(plain.joint)
    facts = RequestFacts(torch.device("cuda"), torch.bfloat16, 64, 64, 8, 8, None, False, True, False)
    assert FfaBackend().objections(facts) == []
    assert "not a multiple" in FfaBackend().objections(replace(facts, linear_gradient=False))[0]
    assert FfaBackend().objections(replace(facts, linear_gradient=False, needs_backward=False)) == []
    unknown = replace(facts, score_ops=frozenset({"aten::mul", "aten::bucketize"}))
    assert FfaBackend().objections(unknown) == ["cannot generate code for aten::bucketize in a score mod"]


def test_what_has_no_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call, but found out in the first one."""
    score = traced_score(lambda: lambda score, b, h, q, k: torch.round(score, decimals=2))
    for _ in range(2):
        with pytest.raises(ValueError, match="rounding to decimals.*choose another backend"):
            code_of(score, False)
        monkeypatch.delattr("magi_flex.kernels.ffa_generated_score._text", raising=False)


def test_steps_that_read_tables_are_code() -> None:
    table = torch.randn(HEADS, Q_LEN + KV_LEN - 1)
    score = traced_score(lambda t: lambda s, b, h, q, k: s + t[h, q - k + KV_LEN - 1], (table,))
    bias = Bias(table, (0, table.shape[1], 1, -1), KV_LEN - 1)
    q, k = torch.zeros(BATCH, HEADS, Q_LEN, 8), torch.zeros(BATCH, HEADS, KV_LEN, 8)
    plan = MaskPlan(RowIntervals.full(Q_LEN, KV_LEN))
    rounded = traced_score(lambda: lambda s, b, h, q, k: torch.round(s, decimals=2))
    for steps, program, code in (
        ((bias,), score, True),
        ((Multiply(2.0), bias), score, True),
        ((Softcap(2.0), bias), score, False),
        ((Softcap(2.0),), score, False),
        ((bias,), ScoreProgram(), False),
        ((bias,), rounded, False),
    ):
        request = AttentionRequest(q, k, k, plan, 0.5, replace(program, steps=steps))
        for backward in (False, True):
            scale, found = scale_and_score(request, backward, 2)
            assert found is not None and (found.generated is not None) == code
            assert code or len(found.kinds) == len(steps)
            assert scale == 0.5
