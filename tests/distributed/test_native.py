"""Native group collectives where there is no GPU: plans, the ops that carry them, and who may use them.

The kernels are tested on Triton's interpreter (tests/interpreted) and on GPUs (tests/gpu).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from magi_flex.distributed.context_mask import Options
from magi_flex.distributed.context_parallel import ContextParallel
from magi_flex.distributed.group_collective import group_cast, group_reduce, native_plan
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.native_exchange import with_native
from magi_flex.distributed.workloads import document_mask
from tests.distributed.world import World, mesh


def check_plans_in_ops(group: dist.ProcessGroup) -> None:
    """A native plan gives the same results and gradients, eager and compiled; on a CPU its rows go by all-to-all."""
    rank = group.rank()
    plan = GroupPlan.from_splits([2, 3], [[0, 1, 2], [(rank + 1) % 3]], [2, 2, 2, 3], [0, 1, 2, (rank + 2) % 3], 3)
    native = with_native(plan, group, torch.device("cpu"))
    assert native.native is not None and native.native.most_rows.tolist() == [9, 9]
    weights = torch.randn(9, 4)

    def function(x: Tensor, plan: GroupPlan) -> Tensor:
        (rows,) = group_cast([x.sin()], plan, group)
        out, lse = group_reduce([rows.view(9, 2, 2) * weights.view(9, 2, 2), rows[:, :2]], plan, group, op="lse")
        return out.sum() + lse.sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 4)
    grads = []
    for call, given in ((function, plan), (function, native), (compiled, native)):
        leaf = x.clone().requires_grad_()
        call(leaf, given).backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


def check_unavailable(group: dist.ProcessGroup) -> None:
    """Asked for where it cannot be: an error on every rank that says why."""
    plan = GroupPlan.from_splits([1], [[1 - group.rank()]], [1], [1 - group.rank()], 2)
    with pytest.raises(RuntimeError, match="tensors are on cpu.*all-to-all"):
        native_plan(plan, torch.device("cpu"), group)
    device_mesh = mesh(2, names=("cp",))
    with pytest.raises(RuntimeError, match='native: True was asked for.*tensors are on cpu.*native="auto"'):
        ContextParallel(device_mesh, document_mask([8]), native=True)
    assert isinstance(ContextParallel(device_mesh, document_mask([8])).shard(torch.zeros(8), 0), DTensor)
    wrong = GroupPlan.from_splits([2], [[1 - group.rank()]], [2 + group.rank()], [1 - group.rank()], 2)
    with pytest.raises(ValueError, match="rank 0 sends 2 rows to rank 1, which expects 3"):
        with_native(wrong, group, torch.device("cpu"))
    with pytest.raises(ValueError, match="ranks .* were given something else"):
        ContextParallel(device_mesh, document_mask([8]), native="auto" if group.rank() else False)


def test_plans_in_ops(world: World) -> None:
    world.run(check_plans_in_ops, 3)


def test_unavailable(world: World) -> None:
    world.run(check_unavailable, 2)


def test_option() -> None:
    with pytest.raises(ValueError, match="native: got 'on', allowed are \"auto\", True and False"):
        Options(native="on")  # type: ignore[arg-type]
