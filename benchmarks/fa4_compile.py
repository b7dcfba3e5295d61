"""Compile flash-attn-4's kernels with our masks and score mods for GPUs that are not there, and read their code.

    python -m benchmarks.fa4_compile                     # every case, into benchmarks/results/fa4_compile.json
    python -m benchmarks.fa4_compile --arch 90 CASE ...  # these alone, a line of JSON for each kernel

Needs flash-attn-4 and the disassembler of the triton package, but no GPU and no driver.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness import RESULTS
from inductor_lowering.tile_program import score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex.kernels import fa4
from magi_flex.kernels.fa4_masks import KernelMask, wants_key_bounds
from magi_flex.kernels.fa4_package import missing_package, package
from magi_flex.kernels.fa4_score import kernel_score
from magi_flex.kernels.fa4_tiles import PADDING, BlockLists, backward_block, forward_block
from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreProgram, ScoreStep, Softcap

LENGTH, HEADS, KV_HEADS = 2048, 8, 2
MULTIPROCESSORS, CLUSTERS, SHARED_MEMORY, L2_CACHE = 132, 74, 232448, 60_000_000
OPERATIONS = ("R2P", "LDL", "STL", "ISETP", "FSEL", "HGMMA", "UTCHMMA")
# Codes of records in a cubin's .nv.info sections, and the form of those that say their size.
_REGISTERS, _FRAME, _SIZED = 0x2F, 0x11, 0x04
SCORES: dict[str, tuple[ScoreStep, ...]] = {
    "": (),
    "softcap": (Softcap(20.0),),
    "alibi": (Distance(torch.ones(HEADS), True),),
    "bias": (Multiply(0.5), Bias(torch.ones(2 * LENGTH), (0, 0, 1, -1), LENGTH - 1), Softcap(20.0)),
}


GENERAL = "general"  # a mod of no simple steps, with every operation that kernels can do


def _everything(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    x = (score.abs() + 1).log() + score.sin() * score.cos() + torch.erf(score) - torch.exp(-score) + torch.exp2(-score)
    x = x + (score * score + 1).log2() * (score * score + 1).log10() + (score * score + 2).sqrt().rsqrt()
    x = x + score.floor() - score.ceil() * score.trunc() + torch.tanh(x) ** 3 + torch.sigmoid(x) + (x.abs() + 1) ** 1.5
    x = torch.maximum(x, score) + torch.minimum(x, score) / (2 + x * x) + torch.relu(x) + torch.sign(x).clamp(-0.5, 0.5)
    near = ((q - k).abs() < 7) | ~((q // 5 == (k - 300) // 5) ^ (q % 3 != (k - 300) % 3))
    place = torch.where(near & seen[h, q.long()], q - k, -1).clamp(min=-5)
    return torch.where(near, x + table[h, place], x * (place & 3) + table[0, k].float())


def _general_score() -> ScoreProgram:
    with item_access_as_index():
        indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
        captures = (torch.ones(HEADS, LENGTH, dtype=torch.bfloat16), torch.ones(HEADS, LENGTH, dtype=torch.bool))
        graph = make_fx(_everything)(torch.zeros(()), *indices, *captures)
    return ScoreProgram(None, score_program(graph), captures=captures, needs_grad=(False, False))


@dataclass(frozen=True)
class Case:
    """A kernel to compile.

    Attributes:
        arch: 90 or 100.
        masking: "bits", "element" (the same mask_mod called score by score), "indices" (a causal mask_mod without
            tables, as one would write it for the package, and block lists), or "causal" (the package's own flag).
        slots: intervals of a row (9: in a loop).
        score: a key of SCORES, or GENERAL (forward).
    """

    arch: int
    direction: str
    head_dim: int = 128
    v_dim: int = 128
    masking: str = "bits"
    slots: int = 1
    score: str = ""

    @property
    def name(self) -> str:
        """As the command line takes it."""
        return f"{self.direction}:{self.head_dim}:{self.v_dim}:{self.masking}:{self.slots}:{self.score}"

    @staticmethod
    def parse(arch: int, name: str) -> Case:
        direction, head_dim, v_dim, masking, slots, score = name.split(":")
        return Case(arch, direction, int(head_dim), int(v_dim), masking, int(slots), score)


def _both(arch: int, head_dim: int = 128, v_dim: int = 128, **options: Any) -> list[Case]:
    return [Case(arch, direction, head_dim, v_dim, **options) for direction in ("forward", "backward")]


CASES = [
    *_both(90),
    *_both(100),
    *_both(90, masking="element"),
    *_both(100, masking="element"),
    *_both(90, score="bias"),
    Case(90, "forward", score=GENERAL),
    Case(100, "forward", score="alibi"),
    *_both(90, slots=2),
    *_both(90, slots=9),
    *_both(90, 64, 64),
    *_both(90, 256, 256),
    *_both(90, 192, 128),
    *_both(90, 96, 96),
    Case(90, "forward", 80, 80),
    Case(90, "forward", 72, 72),
    *_both(100, masking="causal"),
    *_both(100, masking="indices"),
    *_both(100, 64, 64),
    *_both(100, 192, 128),
    Case(100, "forward", 256, 256),
    *_both(100, slots=9),
    *_both(100, 96, 96),
    *_both(100, 80, 80),
    *_both(100, 72, 72),
    Case(100, "forward", slots=2),
    *_both(90, score="alibi"),
    *_both(100, score="bias"),
    *_both(90, masking="causal"),
]


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        registers: of a thread at the launch (warps of the large kernels trade them later).
        frame_bytes: local memory of a thread: spills.
        operations: how often instructions occur.
    """

    kernel: str
    registers: int
    frame_bytes: int
    operations: dict[str, int]


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    reason = missing_package()
    if reason is None and _disassembler() is None:
        reason = "needs the triton package for its disassembler"
    return reason


def _disassembler() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin/nvdisasm"
    return str(path) if path.exists() else None


# ---- a GPU that is not there ----------------------------------------------------------------------------------------


class _Device:
    name, minor, multi_processor_count = "none", 0, MULTIPROCESSORS
    shared_memory_per_block_optin, L2_cache_size = SHARED_MEMORY, L2_CACHE

    def __init__(self, arch: int):
        self.major = arch // 10


class _HardwareInfo:
    def __init__(self, *args: Any, **options: Any): ...

    def get_max_active_clusters(self, *args: Any, **options: Any) -> int:
        return CLUSTERS

    def get_device_multiprocessor_count(self, *args: Any, **options: Any) -> int:
        return MULTIPROCESSORS


def pretend(arch: int, folder: Path) -> None:
    """Let torch and CuTe DSL believe in a GPU of ``arch``, for the whole process; kernels go to ``folder``."""
    os.environ.update(
        FLASH_ATTENTION_ARCH=f"sm_{arch}",
        CUTE_DSL_ARCH=f"sm_{arch}a",
        CUTE_DSL_KEEP="cubin",
        CUTE_DSL_KEEP_CUBIN="1",
        CUTE_DSL_DUMP_DIR=str(folder),
        CUTE_DSL_NO_CACHE="1",
    )
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *args, **options: (arch // 10, 0)
    cuda.get_device_properties = lambda *args, **options: _Device(arch)
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    import cutlass.utils

    cutlass.utils.HardwareInfo = _HardwareInfo


# ---- compiling ------------------------------------------------------------------------------------------------------


def compile_case(case: Case) -> None:
    """Through the functions that the backend calls, on tensors without memory."""
    backward = case.direction == "backward"
    program = _general_score() if case.score == GENERAL else ScoreProgram(steps=SCORES[case.score])
    sizes = (1, HEADS, LENGTH, LENGTH)
    score = kernel_score(program, program.steps, sizes, backward)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, out = _tensor(1, LENGTH, HEADS, case.head_dim), _tensor(1, LENGTH, HEADS, case.v_dim)
        k, v = _tensor(1, LENGTH, KV_HEADS, case.head_dim), _tensor(1, LENGTH, KV_HEADS, case.v_dim)
        if backward and fa4.must_spread(case.arch, (case.head_dim, case.v_dim), score):
            k, v = _tensor(1, LENGTH, HEADS, case.head_dim), out
        mask = _mask(case)
        arguments = {
            **fa4.mask_arguments(mask, case.arch, backward, as_bits=case.masking == "bits"),
            **fa4.score_arguments(mask, score, q.transpose(1, 2), backward),
        }
        if case.masking == "indices":
            arguments |= {"mask_mod": _causal_by_indices, "aux_tensors": None}
        interface = package().interface
        if backward:
            lse = _tensor(1, HEADS, LENGTH, dtype=torch.float32)
            interface._flash_attn_bwd(q, k, v, out, out, lse, softmax_scale=0.1, dlse=lse, **arguments)
        else:
            adaption = fa4.forward_adaption(mask, case.arch)
            with nullcontext() if adaption is None else adaption.tracing:
                interface._flash_attn_fwd(q, k, v, out=out, softmax_scale=0.1, return_lse=True, **arguments)


def _causal_by_indices(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _mask(case: Case) -> KernelMask:
    if case.masking == "causal":
        return KernelMask({"causal": True})
    dims, backward = (case.head_dim, case.v_dim), case.direction == "backward"
    if backward:
        block = backward_block(case.arch, *dims)
        tiles, columns = -(-LENGTH // block.kv), -(-LENGTH // block.q)
    else:
        block = forward_block(case.arch, *dims, LENGTH * HEADS // KV_HEADS)
        tiles, columns = -(-LENGTH // block.q), -(-LENGTH // block.kv)
    integers = torch.int32
    pairs = [(_tensor(1, 1, tiles, dtype=integers), _tensor(1, 1, tiles, columns, dtype=integers)) for _ in range(2)]
    bounds = [_tensor(1, 1, case.slots, LENGTH + PADDING, dtype=integers) for _ in range(2)]
    by_key = backward and wants_key_bounds(case.arch, case.head_dim)
    return KernelMask({}, None, (bounds[0], bounds[1]), by_key, BlockLists(*pairs[0], *pairs[1]), block)


def read_code(cubin: Path) -> Code:
    disassembler = _disassembler()
    assert disassembler is not None
    sass = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    operations = {name: len(re.findall(rf"\b{name}\b", sass)) for name in OPERATIONS}
    kernel = re.search(r"Flash\w*?(?=_object)", cubin.stem)
    content = cubin.read_bytes()
    return Code(
        kernel.group() if kernel else cubin.stem, _largest(content, _REGISTERS), _largest(content, _FRAME), operations
    )


def _largest(cubin: bytes, code: int) -> int:
    """The largest value of such records over the kernels of a file."""
    return max((value for found, value in _records(cubin) if found == code), default=0)


def _records(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Codes and values of records that hold a symbol's number and a value, in the .nv.info sections of an ELF file."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(cubin[at : at + size], "little")

    table, entry, count, names = number(0x28, 8), number(0x3A, 2), number(0x3C, 2), number(0x3E, 2)
    first_name = number(table + names * entry + 0x18, 8)
    for header in range(table, table + count * entry, entry):
        if not cubin.startswith(b".nv.info", first_name + number(header, 4)):
            continue
        at = number(header + 0x18, 8)
        end = at + number(header + 0x20, 8)
        while at < end:
            form, code, size = cubin[at], cubin[at + 1], number(at + 2, 2)
            at += 4
            if form == _SIZED:
                if size == 8:
                    yield code, number(at + 4, 4)
                at += size


def compile_here(arch: int, names: Iterable[str]) -> None:
    """Compile the cases for one architecture in this process; a line of JSON each."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        os.chdir(folder)
        pretend(arch, folder)
        for name in names:
            start = time.perf_counter()
            compile_case(Case.parse(arch, name))
            codes = []
            for cubin in sorted(folder.rglob("*.cubin")):
                codes.append(asdict(read_code(cubin)))
                cubin.unlink()
            seconds = round(time.perf_counter() - start, 1)
            print(json.dumps({"arch": arch, "case": name, "seconds": seconds, "kernels": codes}), flush=True)


def compile_elsewhere(arch: int, names: list[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """The same in another process, as it cannot be undone; what each case gave."""
    command = [sys.executable, "-m", "benchmarks.fa4_compile", "--arch", str(arch), *names]
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != len(names):
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--arch", type=int)
    parser.add_argument("--directory", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep what the result file has already")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    if options.arch is not None:
        return compile_here(options.arch, options.cases)
    names = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "torch")
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "what": "compiled only, on a machine without a GPU; nothing was run",
        "versions": {name: importlib.metadata.version(name) for name in names},
        "rows": [],
    }
    path = options.directory / "fa4_compile.json"
    if options.resume:
        record["rows"] = [row for row in json.loads(path.read_text())["rows"] if "error" not in row]
    done = {(row["arch"], row["case"]) for row in record["rows"]}
    for case in CASES:
        if (case.arch, case.name) in done:
            continue
        try:
            record["rows"] += compile_elsewhere(case.arch, [case.name])
        except RuntimeError as error:
            record["rows"].append({"arch": case.arch, "case": case.name, "error": str(error)[-600:]})
        print(json.dumps(record["rows"][-1]), flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print("written:", path)


if __name__ == "__main__":
    main()
