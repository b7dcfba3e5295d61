"""Compile the Hopper kernels where nvcc (or NVRTC) is there and look at what came out; no GPU is needed."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from dataclasses import replace

import pytest
import torch

from magi_flex.intervals import RowIntervals
from magi_flex.kernels import cuda_build, cuda_driver, device_plans, ffa_ahead
from magi_flex.kernels.cuda_build import CompileError, Cubin, compile_cubin, has_compiler
from magi_flex.kernels.cuda_driver import is_tma_ready
from magi_flex.kernels.ffa import compiled_head_dims, forward_instance, tma_ready
from magi_flex.kernels.ffa_schedule import make_schedule
from magi_flex.kernels.ffa_score import kernel_score
from magi_flex.kernels.ffa_split import key_parts, split_plan
from magi_flex.kernels.request import (
    Bias,
    Distance,
    Multiply,
    RequestFacts,
    Softcap,
)
from magi_flex.kernels.route import explain_route
from magi_flex.kernels.score_split import leading_factors
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan, build_tile_plan

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler")

# Low nine bits of a 128-bit sm_90 instruction.
HGMMA, R2P, STORE_LOCAL, LOAD_LOCAL = 0x1F0, 0x004, 0x187, 0x183


def instructions(code: bytes, kernel: str) -> Counter[int]:
    """How often each opcode occurs in a kernel of an ELF64 cubin."""
    (section_offset,) = struct.unpack_from("<Q", code, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", code, 0x3A)

    def section(index: int) -> tuple[int, int, int]:
        name, _, _, _, offset, size = struct.unpack_from("<IIQQQQ", code, section_offset + index * entry_size)
        return name, offset, size

    _, names_at, _ = section(names_index)
    for index in range(count):
        name, offset, size = section(index)
        end = code.index(b"\0", names_at + name)
        if code[names_at + name : end] == f".text.{kernel}".encode():
            words = struct.unpack_from(f"<{size // 8}Q", code, offset)
            return Counter(word & 0x1FF for word in words[::2])
    raise AssertionError(f"no kernel {kernel}")


@needs_compiler
@pytest.mark.parametrize("merged", [False, True])
def test_forward_uses_the_matrix_units_and_spills_nothing(merged: bool) -> None:
    instance = forward_instance(torch.bfloat16, 128, 128, group=8, mask_heads=1, wide_out=merged, accumulate=merged)
    cubin = instance.compile()
    assert cubin.spill_bytes == 0
    assert cubin.warnings == []
    found = instructions(cubin.code, "ffa_forward")
    # Twice (before and in the loop), and once more for the short step: 8 steps over the head dim for the scores, and
    # one every 16 keys for the output.
    assert found[HGMMA] == 3 * (128 // 16) + (2 * instance.kv_tile + instance.narrow_tile) // 16
    # Masks become predicates: kv_tile / 4 bits of two rows, at most 7 at a time, twice.
    assert found[R2P] >= 2 * 2 * (instance.kv_tile // 4 // 7)
    assert found[STORE_LOCAL] == found[LOAD_LOCAL] == 0


@needs_compiler
def test_other_head_dims_spill_nothing() -> None:
    for dims, steps in (((64, 64), ()), ((256, 256), ()), ((128, 128), ("softcap",))):  # the tightest in registers
        instance = forward_instance(torch.float16, *dims, group=1, mask_heads=1, score_steps=steps)
        cubin = instance.compile()
        assert (cubin.spill_bytes, cubin.warnings) == (0, []), instance


@needs_compiler
def test_kernels_built_ahead_are_those_that_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ffa_ahead, "HEAD_DIMS", ((64, 64),))
    kept = {instance.defines()["FFA_PACK"] for instance in ffa_ahead.forward_instances([1, 8, 16])}
    assert kept == {1, 8}
    ahead = ffa_ahead.forward_instances([8])
    counted = device_plans.missing() is None
    assert forward_instance(torch.float16, 64, 64, 8, 1, counted=counted) in ahead and len(ahead) == 4
    assert [x.head_dim for x in ffa_ahead.backward_instances([8])] == [64, 64]
    assert ffa_ahead.gradient_q_instances([8]) == []
    monkeypatch.setattr(ffa_ahead, "forward_instances", lambda groups: ahead[:1])
    monkeypatch.setattr(ffa_ahead, "backward_instances", lambda groups: [])
    monkeypatch.setattr(cuda_build, "cache_directory", lambda: tmp_path)
    ffa_ahead.main(["--jobs", "1"])
    assert len(list(tmp_path.glob("forward-sm_90a-*.cubin"))) == 1
    assert "1 of 1 kernels" in capsys.readouterr().out


@needs_compiler
def test_compiled_code_is_kept_and_told_apart(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "sources" / "toy" / "toy.cu"
    source.parent.mkdir(parents=True)
    source.write_text('extern "C" __global__ void toy(int* x) { *x = VALUE; }\n')
    monkeypatch.setattr(cuda_build, "SOURCES", tmp_path / "sources")
    first = compile_cubin("toy/toy.cu", {"VALUE": 1})
    files = set((tmp_path / "magi_flex" / "cuda").iterdir())
    assert compile_cubin("toy/toy.cu", {"VALUE": 1}) == first
    assert set((tmp_path / "magi_flex" / "cuda").iterdir()) == files
    assert compile_cubin("toy/toy.cu", {"VALUE": 2}).code != first.code
    source.write_text('extern "C" __global__ void toy(int* x) { *x = VALUE + 1; }\n')
    assert compile_cubin("toy/toy.cu", {"VALUE": 1}).code != first.code
    with pytest.raises(CompileError, match="VALUE"):
        compile_cubin("toy/toy.cu", {})


def test_parameter_block() -> None:
    block = cuda_driver.ParameterBlock(2, struct.Struct("<Qi"))
    assert block.address % 64 == 0 and block.size == 2 * 128 + 64
    block.set_map(1, bytes(range(128)))
    block.set_rest(1 << 40, -7)
    packed = ctypes.string_at(block.address, block.size)
    assert packed[:128] == bytes(128) and packed[128:256] == bytes(range(128))
    assert struct.unpack_from("<Qi", packed, 256) == (1 << 40, -7)


def test_what_the_copy_engine_takes() -> None:
    x = torch.zeros(2, 4, 6, 64, dtype=torch.bfloat16)
    assert is_tma_ready(x) and is_tma_ready(x.transpose(1, 2)) and is_tma_ready(x[..., 8:24])
    assert is_tma_ready(x[:, :, :1, :].transpose(0, 2))
    assert not is_tma_ready(x[..., 4:])  # address
    assert not is_tma_ready(x.transpose(2, 3))  # last axis
    assert not is_tma_ready(x[..., :60].contiguous())  # stride of 120 bytes
    assert not is_tma_ready(x[:1].expand(2, -1, -1, -1))  # stride 0
    for y in (x[..., 4:60], x[:1].expand(2, -1, -1, -1)):
        assert torch.equal(tma_ready(y[..., :56]), y[..., :56]) and is_tma_ready(tma_ready(y[..., :56]))
    assert tma_ready(x) is x


def test_reports_are_understood() -> None:
    report = "ptxas info : 8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\nUsed 168 registers, used 1"
    assert Cubin(b"", report).spill_bytes == 28
    assert Cubin(b"", report).registers == 168
    assert len(Cubin(b"", "(C7514) Potential Performance Loss: serialized").warnings) == 1


def test_head_dims() -> None:
    assert compiled_head_dims(64, 64) == (64, 64)
    assert compiled_head_dims(72, 64) == (96, 96)
    assert compiled_head_dims(192, 128) == (192, 128)
    assert compiled_head_dims(128, 192) == (192, 192)
    assert compiled_head_dims(200, 8) == (256, 256)
    assert compiled_head_dims(100, 100) is None
    assert compiled_head_dims(264, 264) is None


def test_query_heads_share_row_tiles_only_where_they_share_the_mask() -> None:
    pack = {
        (group, mask_heads): forward_instance(torch.bfloat16, 128, 128, group, mask_heads, False).pack
        for group, mask_heads in ((8, 1), (6, 1), (1, 1), (16, 1), (8, 64))
    }
    assert pack == {(8, 1): 8, (6, 1): 2, (1, 1): 1, (16, 1): 8, (8, 64): 1}


def random_tiles(seed: int) -> TilePlan:
    torch.manual_seed(seed)
    starts = torch.randint(0, 300, (2, 1, 2, 200), dtype=torch.int32)
    ends = torch.randint(0, 300, (2, 1, 2, 200), dtype=torch.int32)
    ends[..., torch.rand(200) < 0.3] = 0
    plan = MaskPlan(RowIntervals.build(starts, ends, 300))
    return build_tile_plan(plan, 16, 64, ragged=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("narrow_tile", [0, 32])
def test_schedule_covers_the_plan_longest_tiles_first(seed: int, narrow_tile: int) -> None:
    tiles = random_tiles(seed)
    schedule = make_schedule(tiles, narrow_tile)
    masks = torch.repeat_interleave(torch.arange(2), tiles.head_ptr.diff()).tolist()

    def keys(runs: torch.Tensor) -> list[int]:
        return sorted(key for begin, end in runs.tolist() for key in range(begin, end))

    wanted = {}
    for n, mask in enumerate(masks):
        partial = tiles.partial_runs[tiles.partial_ptr[n] : tiles.partial_ptr[n + 1]]
        full = tiles.full_runs[tiles.full_ptr[n] : tiles.full_ptr[n + 1]]
        wanted[int(tiles.tile_begin[n]), int(tiles.tile_end[n]), mask] = (keys(partial), keys(full))
    got, costs, short_steps = {}, [], 0
    for rows, runs, head in zip(
        schedule.tile_rows.tolist(), schedule.tile_runs.tolist(), schedule.tile_heads.tolist(), strict=True
    ):
        partial, full = schedule.partial_runs[runs[0] : runs[1]], schedule.full_runs[runs[2] : runs[3]]
        got[tuple(rows[:3])] = (keys(torch.cat((partial, torch.tensor([head])))), keys(full))
        assert rows[3] == sum(-(-(end - begin) // 64) for begin, end in (*partial.tolist(), *full.tolist()))
        assert 0 <= head[1] - head[0] <= narrow_tile
        short_steps += head[1] > head[0]
        costs.append((rows[2], -2 * rows[3] - (head[1] > head[0])))
    assert got == wanted
    assert costs == sorted(costs)
    if seed % 2 == 0:  # runs may begin anywhere
        assert (short_steps > 0) == (narrow_tile > 0)


def test_row_tiles_that_fill_the_last_wave() -> None:
    def consumers(rows: int, **options) -> int:
        return forward_instance(torch.bfloat16, 128, 128, 8, 1, rows=rows, **options).consumers

    assert consumers(64 * 32768) == 3
    assert consumers(132 * 192) == 3
    assert consumers(132 * 128) == 2
    assert consumers(64 * 512) == 2  # two waves of 128 rows are full, of 192 the second is a third full
    assert consumers(64 * 32768, score_steps=("softcap",)) == 2
    assert forward_instance(torch.bfloat16, 256, 256, 8, 1, rows=64 * 32768).consumers == 2


def test_schedule_of_nothing() -> None:
    plan = MaskPlan(RowIntervals.empty(40, 30))
    schedule = make_schedule(build_tile_plan(plan, 16, 64, ragged=True), 32)
    assert schedule.tile_rows[:, 3].sum() == 0 and (schedule.tile_heads == 0).all()
    assert (schedule.tile_rows[:, 1] - schedule.tile_rows[:, 0]).sum() == 40


def test_score_steps_in_order() -> None:
    table = torch.zeros(10, dtype=torch.bfloat16)
    steps = (Softcap(20.0), Distance(torch.ones(4), absolute=True), Bias(table, (0, 1, 2, 3), 4, 0.5))
    score = kernel_score(steps)
    assert score.kinds == ("softcap", "absolute_distance", "bias_bf16")
    assert score.values[:3] == (20.0, 0.05, 0) and score.values[7:14] == (
        0.0,
        0.0,
        score.tables[0].data_ptr(),
        0,
        1,
        0,
        0,
    )
    assert score.values[14:] == (0.5, 0.0, table.data_ptr() + 8, 0, 1, 2, 3)


def test_leading_factors_join_the_scale() -> None:
    def factors(*steps) -> tuple:
        return leading_factors(0.5, steps)

    assert factors() == (0.5, ())
    assert factors(Multiply(2.0), Multiply(-3.0)) == (-3.0, ())
    assert factors(Multiply(2.0), Softcap(1.0), Multiply(4.0)) == (1.0, (Softcap(1.0), Multiply(4.0)))


def test_a_cpu_request_is_told_why() -> None:
    facts = RequestFacts(torch.device("cpu"), torch.bfloat16, 64, 64, 8, 8, (), False, False, False)
    reasons = dict(explain_route(facts))["ffa"]
    assert reasons == ["needs a CUDA device, not cpu"]


def test_few_rows_are_split_over_their_keys() -> None:
    assert key_parts(8, 131072, 132) == 16
    assert key_parts(1, 131072, 132) == 32  # the most
    assert key_parts(8, 4096, 132) == 8  # parts of 512 keys
    assert key_parts(100, 131072, 132) == key_parts(8, 600, 132) == 1
    plan = MaskPlan(RowIntervals.full(2, 10))
    parts = split_plan(plan, 3, 2)
    assert parts.starts.shape[:2] == (6, 1)
    dense = parts.to_dense().view(3, 2, 2, 10)
    assert (dense.sum(0) == 1).all() and (dense.sum((1, 2, 3)) > 0).all()
    assert split_plan(plan, 3, 2) is parts


@needs_compiler
def test_parts_spill_nothing() -> None:
    instance = forward_instance(torch.bfloat16, 128, 128, 8, 1, wide_out=True, rows=1)
    cubins = [replace(instance, narrow_tile=0, split_keys=True).compile()]
    cubins.append(compile_cubin("ffa/combine.cu", {"FFA_DTYPE": "bf16", "FFA_WIDE_OUT": False}))
    assert [(cubin.spill_bytes, cubin.warnings) for cubin in cubins] == [(0, [])] * 2
