"""The ways to share a sequence that bench_context_parallel.py compares compute the same thing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.bench_context_parallel import attended_keys, intervals, traffic
from benchmarks.context_parallel_sides import Problem, all_gather, computing_only, ours, ring
from magi_flex.distributed.context_parallel import ContextParallel
from tests.distributed.world import World, mesh


def check_sides(group: dist.ProcessGroup, mask: str, length: int, cut: str) -> None:
    device_mesh = mesh(group.size(), names=("cp",))
    whole = intervals(mask, length, torch.device("cpu"))
    cp = ContextParallel(device_mesh, whole, cut=cut, forward_stages=2)
    rows = len(cp.rows)
    problem = Problem(device_mesh, whole, cp, *(torch.randn(1, n, rows, 16) for n in (4, 2, 2, 4)))
    side = ours(problem)
    assert side.backward is not None
    wanted = (side.forward(), *side.backward())
    for side in (all_gather(problem), ring(problem)):
        for actual, expected in zip((side.forward(), *side.backward()), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    still = computing_only(problem)
    assert still.forward().shape == wanted[0].shape and still.backward()[1].shape == wanted[2].shape
    for backward in (False, True):
        bytes_ = traffic(problem, backward)
        assert bytes_["MiB received"] == bytes_["MiB lower bound"]


@pytest.mark.parametrize(
    "mask,cut", [("full", "heads"), ("causal", "keys"), ("varlen_causal", "heads"), ("varlen_block_causal", "keys")]
)
def test_sides(world: World, mask: str, cut: str) -> None:
    world.run(check_sides, 3, mask, 97, cut)


def test_attended_keys() -> None:
    mask = intervals("varlen_causal", 60, torch.device("cpu"))
    rows = torch.tensor([3, 17, 50])
    assert torch.equal(attended_keys(mask, rows), mask.take_rows(rows).to_dense()[0, 0].any(0))
