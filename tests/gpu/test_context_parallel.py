"""Context parallel attention on GPUs: over NCCL on two of them, or over gloo by two processes that share one.

Skipped without a GPU.  The checks take the device, so that they also run on a CPU, and one by one:

    python -m tests.gpu.test_context_parallel [check_masks_by_heads ...]
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import magi_flex
from magi_flex.distributed import ContextParallel, Timeline
from magi_flex.distributed.group_collective import group_cast, group_reduce, verify_group_plan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.timeline import COMPUTE, NETWORK, REDUCTION
from magi_flex.distributed.workloads import document_mask, draw_document_lengths
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
RANKS, DIM, STEPS = 2, 64, 50
Check = Callable[[DeviceMesh], None]


def _serve(rank: int, store: str, device_type: str, checks: tuple[Check, ...]) -> None:
    options: dict[str, object] = {"timeout": datetime.timedelta(seconds=300)}
    backend = "gloo"
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # not needed
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # only tests let processes share a GPU
        if torch.cuda.device_count() >= RANKS:
            backend, options["device_id"] = "nccl", device
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, **options)
    magi_flex.enable()
    mesh = init_device_mesh(device_type, (RANKS,), mesh_dim_names=("cp",))
    for check in checks:
        begin = time.perf_counter()
        check(mesh)
        if rank == 0:
            print(f"{check.__name__}: passed in {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


def run(*checks: Check, device_type: str = "cuda") -> None:
    """The checks, one after the other, on RANKS processes; raises what any of them raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, (f"{folder}/store", device_type, checks), RANKS)


def operands(mesh: DeviceMesh, batch: int, heads: int, kv_heads: int, length: int) -> list[Tensor]:
    """q, k, v, d_out in bfloat16; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(batch, n, length, DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(size, generator=generator).to(torch.bfloat16).to(mesh.device_type) for size in sizes]


def whole(cp: ContextParallel, x: Tensor) -> Tensor:
    """``x`` (sharded along dimension 2) on the CPU, in the order of the sequence.

    Not by ``cp.unshard``: gloo's all-gather for DTensors reads the memory of a GPU as if it were the CPU's.
    """
    parts: list[Tensor] = [torch.empty(0)] * RANKS
    dist.all_gather_object(parts, x.to_local().cpu(), group=cp.group)  # type: ignore[attr-defined]
    return torch.cat(parts, 2).index_select(2, torch.argsort(cp.dispatch.order()))


def check_results(cp: ContextParallel, x: list[Tensor], dense: Tensor, what: str) -> None:
    leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
    out = flex_attention(*leaves, block_mask=cp.block_mask, enable_gqa=True)
    out.backward(cp.shard(x[3], 2))
    dense = dense.to(x[0].device)
    exact = dense_attention_with_gradients(*x, mask_BHQK=dense)
    same = dense_attention_with_gradients(*x, mask_BHQK=dense, dtype=torch.bfloat16)
    for name, actual in zip(("out", "dq", "dk", "dv"), (out, *(leaf.grad for leaf in leaves)), strict=True):
        try:
            assert_within_factor(whole(cp, actual), getattr(same, name).cpu(), getattr(exact, name).cpu())
        except AssertionError as error:
            raise AssertionError(f"{what}: {name}: {error}") from error


def check_masks_by_keys(mesh: DeviceMesh) -> None:
    """Every other mask."""
    check_masks(mesh, "keys", list(MASKS)[::2])


def check_masks_by_heads(mesh: DeviceMesh) -> None:
    """And the others."""
    check_masks(mesh, "heads", list(MASKS)[1::2])


def check_masks(mesh: DeviceMesh, cut: str, names: list[str]) -> None:
    """Cut into three; 9 query and 3 key heads where the mask does not say otherwise."""
    length = 257
    for i, name in enumerate(names):
        begin = time.perf_counter()
        case = make_mask(name, length)
        dense = case.dense()
        heads = 9 if case.heads == 1 else 3 * case.heads
        if case.heads > 1:
            dense = dense.repeat_interleave(3, 1)
        options = {"cut": cut, "forward_stages": 3, "backward_stages": 3, "keep_keys": i % 2 == 0}
        cp = ContextParallel(mesh, MaskPlan.from_dense(dense), **options)
        check_results(cp, operands(mesh, case.batch, heads, 3, length), dense, name)
        if dist.get_rank() == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


def check_collectives(mesh: DeviceMesh) -> None:
    """Rows of three dtypes to the other rank and back, with plans on the device, at once and asynchronously."""
    group, device = mesh.get_group(), mesh.device_type
    rank = dist.get_rank()
    plan = GroupPlan.from_splits([2, 3], [[0, 1], [1 - rank]], [2, 2, 3], [0, 1, 1 - rank], RANKS).to(device)
    verify_group_plan(plan, group)
    rows = torch.arange(5, device=device) + 10 * rank
    expected = torch.tensor([0, 1, 10, 11, *(x + 10 * (1 - rank) for x in (2, 3, 4))], device=device)
    tensors = [rows.bfloat16(), rows[:, None].expand(5, 3).double(), rows]
    for results in (group_cast(tensors, plan, group), group_cast(tensors, plan, group, async_op=True).wait()):
        for result, like in zip(results, tensors, strict=True):
            assert result.dtype == like.dtype
            assert torch.equal(result.long(), expected.view(-1, *[1] * (like.dim() - 1)).expand(result.shape))
    (back,) = group_reduce([expected.bfloat16()], plan, group)
    assert back.dtype == torch.float32
    assert torch.equal(back.long(), rows * torch.tensor([2, 2, 1, 1, 1], device=device))


def check_timeline(mesh: DeviceMesh) -> None:
    """All lanes are there, and the keys of the next stages are on their way while the local ones are computed."""
    length = 4096
    mask = document_mask([length])
    cp = ContextParallel(mesh, mask, cut="keys", forward_stages=3, backward_stages=3)
    x = operands(mesh, 1, 8, 2, length)
    for _ in range(2):
        cp.timeline = Timeline(mesh.device_type)
        leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
        flex_attention(*leaves, block_mask=cp.block_mask, enable_gqa=True).backward(cp.shard(x[3], 2))
        spans = cp.timeline.spans()
    assert {span.lane for span in spans} == {COMPUTE, NETWORK, REDUCTION}
    local = next(span for span in spans if span.name == "forward local")
    assert sum(span.lane == NETWORK and span.begin < local.end for span in spans) >= 2


def check_training(mesh: DeviceMesh) -> None:
    """New masks each step: one compilation, and memory that does not grow."""
    length = 512
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), fullgraph=True, backend=counter
    )
    held: list[int] = []
    for step in range(STEPS):
        mask = document_mask(draw_document_lengths(length, step, ((1, length, 1),)))
        cp = ContextParallel(mesh, mask)
        x = operands(mesh, 1, 4, 2, length)
        leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
        compiled(*leaves, cp.block_mask).backward(cp.shard(x[3], 2))
        if step % 10 == 0:
            check_results(cp, x, mask.to_dense(), f"step {step}")
        del cp, leaves
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert counter.frame_count == 1, counter.frame_count
    # a few masks more or less may be alive in the memo, not one for each step
    assert not held or max(held[STEPS // 2 :]) <= 1.2 * max(held[: STEPS // 2])


def check_native(mesh: DeviceMesh) -> None:
    """Keys and gradients written straight into the other process's memory."""
    length = 257
    for name, cut, parts in (("causal", "keys", 2), ("document_causal", "heads", 3), ("full", "keys", 2)):
        case = make_mask(name, length)
        options = {"cut": cut, "forward_stages": parts, "backward_stages": parts, "native": True}
        cp = ContextParallel(mesh, MaskPlan.from_dense(case.dense()), **options)
        assert cp.masks[0].native
        check_results(cp, operands(mesh, case.batch, 9, 3, length), case.dense(), name)


CHECKS = (check_collectives, check_masks_by_keys, check_masks_by_heads, check_timeline, check_training)


@pytest.mark.parametrize("check", (*CHECKS, check_native), ids=lambda check: check.__name__)
def test_two_ranks(check: Check) -> None:
    run(check)


def test_example() -> None:
    """FSDP2 and context parallel attention on all GPUs: the losses of one."""
    ranks = str(torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += [str(ROOT / "examples" / "train_context_parallel.py"), "--compare-one-rank", "--steps", "5"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses agree" in done.stdout
    assert re.search(r"ranks: loss .* 1 graph compiled", done.stdout)


if __name__ == "__main__":
    wanted = [globals()[name] for name in sys.argv[1:]] or CHECKS
    run(*wanted, device_type="cuda" if torch.cuda.is_available() else "cpu")
