"""What this machine can run, what is missing for the rest, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from magi_flex.kernels import route
from magi_flex.kernels.cuda_build import CompileError, find_compiler

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 14)  # the releases whose hooks the lowering knows
_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        topic: heading it belongs under.
        ok: True: usable; False: missing and wanted; None: not here, and only some uses need it.
        detail: what was found.
        remedy: what to do about it, empty where nothing is to be done.
    """

    topic: str
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """Look at everything.  Builds the CPU kernels if they are not built yet: nothing else tells whether that works."""
    return [*_software(), *_native_code(), *_gpu(), *_distributed(), *_backends()]


def report(checks: list[Check]) -> str:
    """The checks as text."""
    marks = {True: "ok", False: "MISSING", None: "-"}
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    topic = ""
    for check in checks:
        if check.topic != topic:
            lines += ["", check.topic] if lines else [check.topic]
            topic = check.topic
        lines.append(f"  {marks[check.ok]:7}  {check.name:{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"  {'':7}  {'':{width}}  -> {check.remedy}")
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    """First line of what the command prints, or None if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _software() -> list[Check]:
    topic = "Software"
    checks = [Check(topic, "Python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        remedy = f"pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'"
        checks.append(Check(topic, "torch", False, f"{torch.__version__} is too old", remedy))
    else:
        newer = release > NEWEST_TORCH
        note = f", newer than {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, the last one looked at" if newer else ""
        checks.append(Check(topic, "torch", True, torch.__version__ + note))
    plot = _version("matplotlib")
    remedy = "" if plot else "pip install 'magi-flex[plot]'"
    checks.append(Check(topic, "matplotlib", True if plot else None, plot or "not installed: no pictures", remedy))
    return checks


def _native_code() -> list[Check]:
    topic = "Processor and native code"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    version = _first_line(compiler, "--version") if compiler else None
    checks = [Check(topic, "processor", True, _processor())]
    if version:
        checks.append(Check(topic, "C++ compiler", True, f"{compiler}: {version}"))
    else:
        detail = f"{compiler} does not run" if compiler else "no g++ or clang++"
        remedy = "install g++ (Debian, Ubuntu: apt-get install g++): torch.compile and the cpu backend need it"
        checks.append(Check(topic, "C++ compiler", False, detail, remedy))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        checks.append(Check(topic, "Python.h", True, str(header.parent)))
    else:
        remedy = "install Python's headers (Debian, Ubuntu: apt-get install python3-dev): torch.compile needs them"
        checks.append(Check(topic, "Python.h", False, f"not in {header.parent}", remedy))
    return checks


def _processor() -> str:
    name, flags = platform.processor() or platform.machine(), set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    isa = " ".join(flag for flag in _ISA_FLAGS if flag in flags) or torch.backends.cpu.get_cpu_capability()
    return f"{name}, {torch.get_num_threads()} threads, {isa}"


def _gpu() -> list[Check]:
    topic = "GPU"
    checks: list[Check] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            detail = f"{properties.name}, sm_{properties.major}{properties.minor}, "
            checks.append(Check(topic, f"cuda:{index}", True, f"{detail}{properties.total_memory / 2**30:.0f} GiB"))
    elif _first_line("nvidia-smi", "-L"):
        remedy = "install a CUDA build of torch"
        checks.append(Check(topic, "CUDA", False, f"there is a GPU, but torch {torch.__version__} sees none", remedy))
    else:
        checks.append(Check(topic, "CUDA", None, "no GPU"))
    triton = _version("triton")
    checks.append(Check(topic, "triton", True if triton else None, triton or "not installed (comes with CUDA torch)"))
    fa4 = _version("flash-attn-4")
    remedy = "" if fa4 or not torch.cuda.is_available() else "pip install 'magi-flex[fa4]'"
    checks.append(Check(topic, "flash-attn-4", True if fa4 else None, fa4 or "not installed", remedy))
    try:
        checks.append(Check(topic, "CUDA compiler", True, find_compiler().version))
    except CompileError as error:
        checks.append(Check(topic, "CUDA compiler", None, str(error)))
    return checks


def _distributed() -> list[Check]:
    topic = "Distributed"
    if not torch.distributed.is_available():
        return [Check(topic, "torch.distributed", None, "this torch is built without it")]
    found = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return [Check(topic, name, True if here else None, "" if here else "not built in") for name, here in found.items()]


def _backends() -> list[Check]:
    topic = "Attention backends, fastest first"
    devices = [torch.device("cuda")] * torch.cuda.is_available() + [torch.device("cpu")]
    checks = []
    for name in route.backend_names():
        backend = route.load(name)
        missing = [backend if isinstance(backend, str) else backend.missing(device) for device in devices]
        serves = [device.type for device, reason in zip(devices, missing, strict=True) if reason is None]
        detail = f"runs on {', '.join(serves)}" if serves else str(missing[0])
        checks.append(Check(topic, name, True if serves else None, detail))
    return checks
