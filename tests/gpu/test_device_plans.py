"""Plans built on a GPU: those that torch builds, without waiting for the device, also inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import magi_flex
import magi_flex.ops  # the operators
from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.packed_labels import LabelledIntervals
from magi_flex import mods
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import device_plans
from magi_flex.kernels.device_plans import build_device_plan
from magi_flex.kernels.ffa_backward_schedule import plan_backward
from magi_flex.kernels.ffa_schedule import device_schedule
from magi_flex.kernels.tile_plans import choose_builder, kernel_tile_plan
from magi_flex.mask_outline import Outline
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec, split_captures
from magi_flex.tiles import build_tile_plan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import assert_within_factor, dense_attention_with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available() and device_plans.missing() is None:
    from tests.interpreted.test_device_plans import assert_same, assert_same_schedule, total_steps, without_capacity
    from tests.test_tiles import CLASSES, check_invariants
else:
    CLASSES = {}

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def device_builder() -> Iterator[None]:
    before = choose_builder("device")
    yield
    choose_builder(before)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Operations that wait for the device fail from the first use of the returned switch on."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def interval_plan(starts: Tensor, ends: Tensor, kv_len: int) -> MaskPlan:
    bounds = (x.view(1, 1, 1, -1).cuda() for x in (starts, ends))
    return MaskPlan(RowIntervals.build(*bounds, kv_len))


def benchmark_masks(size: int) -> dict[str, MaskPlan]:
    """Masks whose intervals move forward."""
    row = torch.arange(size)
    lengths = torch.tensor([7, 600, 3, 3, 130, 1000, 2, 41] * (size // 1786 + 1))
    end = lengths.cumsum(0)[torch.repeat_interleave(torch.arange(len(lengths)), lengths)][:size].clamp(max=size)
    begin = (lengths.cumsum(0) - lengths)[torch.repeat_interleave(torch.arange(len(lengths)), lengths)][:size]
    return {
        "full": interval_plan(row * 0, row * 0 + size, size),
        "causal": interval_plan(row * 0, row + 1, size),
        "documents": interval_plan(begin, end, size),
        "documents, causal": interval_plan(begin, row + 1, size),
        "window 1024, causal": interval_plan(row - 1023, row + 1, size),
    }


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("size", "sizes"),
    [*((size, sizes) for size in (129, 2046, 32768) for sizes in ((24, 80), (64, 128))), (1, (64, 128)), (129, (7, 5))],
)
def test_same_as_torch(size: int, sizes: tuple[int, int], kind: str) -> None:
    run_align = 8 if kind == "ragged-t" and sizes[0] % 8 == 0 else 1
    for plan in benchmark_masks(size).values():
        tiles = build_device_plan(plan.intervals, *sizes, *CLASSES[kind], run_align)
        wanted = build_tile_plan(plan, *sizes, *CLASSES[kind], run_align)
        assert_same(without_capacity(tiles), without_capacity(wanted))


@pytest.mark.parametrize("size", [129, 2046, 32768])
def test_schedules(size: int) -> None:
    for plan in benchmark_masks(size).values():
        for narrow_tile in (0, 32):
            assert_same_schedule(build_device_plan(plan.intervals, 24, 80, False, True), narrow_tile)


@pytest.mark.parametrize("name", ["packed", "shuffled", "returning", "missing"])
def test_rows_in_runs_of_their_labels(name: str) -> None:
    """By our kernel as by torch's operations."""
    size = 5000
    ids = torch.arange(size) // 170
    keys = {"shuffled": ids * 7 % 31, "returning": ids % 4}.get(name, ids) * (1 << 40)
    rows = keys + 1 if name == "missing" else keys
    rest = RowIntervals.build(
        torch.zeros(1, 1, 1, size, dtype=torch.int32), torch.arange(1, size + 1).view(1, 1, 1, -1), size
    )
    on_cpu = LabelledIntervals(rest, rows.view(1, 1, -1), keys.view(1, 1, -1))
    on_gpu = LabelledIntervals(
        RowIntervals(rest.starts.cuda(), rest.ends.cuda(), size), on_cpu.row_labels.cuda(), on_cpu.key_labels.cuda()
    )
    (intervals, holds), (wanted, wanted_holds) = on_gpu.packed(), on_cpu.packed()
    assert bool(holds) == bool(wanted_holds) == (name != "returning")
    assert torch.equal(intervals.starts.cpu(), wanted.starts) and torch.equal(intervals.ends.cpu(), wanted.ends)


@pytest.mark.parametrize("name", MASKS)
def test_mask_patterns(name: str) -> None:
    mask = make_mask(name, 1025, 700).dense()
    intervals = RowIntervals.from_dense(mask)
    if intervals.max_intervals > 32:
        pytest.skip("has bit tiles")
    on_gpu = RowIntervals(intervals.starts.cuda(), intervals.ends.cuda(), intervals.kv_len)
    for kind in CLASSES:
        sizes = (64, 32) if kind.startswith("fixed") else (24, 80)
        tiles = without_capacity(build_device_plan(on_gpu, *sizes, *CLASSES[kind]))
        check_invariants(tiles, mask, *sizes, kind)
        wanted = build_tile_plan(MaskPlan(intervals), *sizes, *CLASSES[kind])
        # Rows of drafts need more spans than a key tile has room for.
        if kind.startswith("fixed") and (name, kind) != ("draft_rows", "fixed-t"):
            assert_same(tiles, wanted)
        else:
            assert sum(total_steps(tiles)) <= 1.25 * sum(total_steps(wanted)) + 4


def test_nothing_is_waited_for(device_builder: None, no_waiting: None) -> None:
    """Tiles and the schedules of both passes, at sizes that were compiled for before."""
    masks = benchmark_masks(4096)

    def plan_all(plan: MaskPlan) -> None:
        device_schedule(kernel_tile_plan(plan, 24, 80, ragged=True), 32)
        plan_backward(plan, 64, 128, 1, 64, 8, 132)
        kernel_tile_plan(plan, 128, 128)
        kernel_tile_plan(plan, 128, 128, transposed=True)

    for plan in masks.values():
        plan_all(plan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for plan in masks.values():
        plan_all(plan)


def test_intervals_are_not_waited_for(no_waiting: None) -> None:
    first = torch.arange(4096, device="cuda") // 1000 * 1000
    window = torch.tensor([5, 2000], device="cuda")
    mask_mods = {
        "documents": lambda b, h, q, k: (k >= first[q]) & (k <= q),
        "windows": lambda b, h, q, k: (q - k < window[h]) & (k <= q),
        "chunks": mods.chunked_local(64),
        "sink": mods.sink_window(4, 512),
    }
    for mask_mod in mask_mods.values():
        program, captures = trace_mask_mod(mask_mod, "cuda")
        program = FxProgram.from_json(program.to_json())
        order, tensors, ints = split_captures(captures)
        spec = MaskSpec(program.to_json(), order).to_json()
        args = (tensors, ints, spec, 1, 2, 4096, 4096, torch.device("cuda"))
        wanted = torch.ops.magi_flex.plan_intervals(*args)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        got = torch.ops.magi_flex.plan_intervals(*args)
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
        dense = magi_flex.plan(mask_mod, 4096, 4096, 1, 2, "cuda").to_dense()
        assert torch.equal(RowIntervals(*got[:2], 4096).to_dense().expand(1, 2, -1, -1), dense.expand(1, 2, -1, -1))


def test_hosts_know_outlines() -> None:
    """Of masks outside of CUDA graphs, as the operators build them: kernels then deal their work by them."""
    for mask_mod in (mods.causal(), mods.sliding_window(100)):
        program, captures = trace_mask_mod(mask_mod, "cuda")
        order, tensors, ints = split_captures(captures)
        spec = MaskSpec(program.to_json(), order)
        outline = spec.build(tensors, ints, 1, 2, 1000, 1000, torch.device("cuda")).plan.outline
        wanted = Outline.of(
            spec.build([x.cpu() for x in tensors], ints, 1, 2, 1000, 1000, torch.device("cpu")).plan.intervals
        )
        assert outline is not None and torch.equal(outline.rows_BHN, wanted.rows_BHN)
        assert outline.area == wanted.area


def test_replayed_plans(device_builder: None) -> None:
    """A captured plan and schedule follow the contents of the intervals that they were captured from."""
    masks = list(benchmark_masks(4096).values())
    static = MaskPlan(RowIntervals(masks[0].starts.clone(), masks[0].ends.clone(), 4096))

    def build() -> tuple[Tensor, ...]:
        tiles = kernel_tile_plan(static, 24, 80, ragged=True)
        schedule = device_schedule(tiles, 32)
        backward = plan_backward(static, 64, 128, 1, 64, 8, 132)
        return schedule.tile_rows, schedule.partial_runs, backward.entries, backward.plan.partial_runs

    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build()
    for plan in masks:
        static.starts.copy_(plan.starts)
        static.ends.copy_(plan.ends)
        graph.replay()
        replayed = [x.clone() for x in captured]
        for again, fresh in zip(replayed[::2], build()[::2], strict=True):
            assert torch.equal(again, fresh)


@pytest.mark.skipif(not HOPPER, reason="needs a backend that can be captured")
@pytest.mark.parametrize("canonical", [False, True])
def test_reduce_overhead(canonical: bool) -> None:
    """Training steps in CUDA graphs, with other documents in every step."""
    size, heads, dim = 1024, 8, 64

    def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        one = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return one / 2 + flex_attention(q, k, v * 2, block_mask=mask, enable_gqa=True) / 4

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, heads, size, dim), (1, 2, size, dim), (1, 2, size, dim))
    torch._dynamo.utils.counters.clear()
    with magi_flex.enable(plans="device"):
        function = torch.compile(two_layers, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for step in range(8):
            q, k, v = (torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in shapes)
            cut = torch.randint(1, size, (3,), generator=torch.Generator().manual_seed(step))
            ids = (torch.arange(size)[:, None] >= cut).sum(1).cuda()
            first = torch.searchsorted(ids, ids)
            dense = (ids[:, None] == ids) & torch.ones(size, size, dtype=torch.bool, device="cuda").tril()
            if canonical:
                mask = magi_flex.create_block_mask(mods.document_causal(ids), None, None, size, size, "cuda")
            else:
                mask = create_block_mask(
                    lambda b, h, q, k, first=first: (k >= first[q]) & (k <= q), None, None, size, size, "cuda"
                )
            torch.compiler.cudagraph_mark_step_begin()
            out = function(q, k, v, mask)
            d_out = torch.randn(out.shape, device="cuda", generator=generator).bfloat16()
            grads = torch.autograd.grad(out, (q, k, v), d_out)
            results = [x.clone() for x in (out, *grads)]
            references = [
                dense_attention_with_gradients(q, k, v, d_out, None, dense[None, None], None, (), dtype=dtype)
                for dtype in (torch.bfloat16, torch.float64)
            ]
            for i, name in enumerate(("out", "dq", "dk", "dv")):
                near, exact = (getattr(reference, name) for reference in references)
                assert_within_factor(results[i], near, exact, floor=1e-2)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
