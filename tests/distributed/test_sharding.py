"""The DTensor rule: batch, heads and sequence sharded, alone and together, with score mods, eager and compiled."""

from __future__ import annotations

import functools
import math
import operator
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, or_masks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import magi_flex
from magi_flex.canonical_mask import CanonicalMaskMod
from magi_flex.distributed.context_parallel import ContextParallel
from magi_flex.distributed.timeline import Timeline
from magi_flex.distributed.workloads import document_mask, draw_document_lengths
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from magi_flex.sharded_mask import HANDLE_MAGIC, find_handle
from tests.cases.reference import dense_attention_with_gradients
from tests.distributed.world import World, mesh

BATCH, HEADS, KV_HEADS, DIM, LENGTH = 4, 4, 2, 16, 48
STEPS = 50


def operands(seed: int = 0, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, d_out; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(BATCH, n, LENGTH, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for n in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-4, msg=lambda m: f"{what}: {m}")


def check(out: DTensor, leaves: list[DTensor], expected, natural_order) -> None:
    for actual, wanted, what in zip(
        (out, *(leaf.grad for leaf in leaves)),
        (expected.out, expected.dq, expected.dk, expected.dv),
        ("out", "dq", "dk", "dv"),
        strict=True,
    ):
        assert_same(natural_order(actual), wanted, what)


def check_batch_and_heads(group: dist.ProcessGroup, compiled: bool) -> None:
    """Everything local; masks and score mods that depend on batch and head see global ones."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    attend = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    layouts: list[tuple[list, int]] = [
        ([Shard(0), Shard(1)], 2),
        ([Shard(1), Replicate()], 2),
        ([Shard(0), Shard(1)], 1),
        ([Replicate(), Shard(0)], 2),
    ]
    limits = torch.tensor([LENGTH, 7, 30, 1])
    slopes = torch.tensor([0.1, 0.5, 1.0, 2.0])
    replicated = [Replicate(), Replicate()]
    limits_d, slopes_d = (distribute_tensor(x, device_mesh, replicated) for x in (limits, slopes))

    def mask_mod(limits: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < limits[b]) & (k <= q + h)

    def score_mod(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * (1 + b) + slopes[h] * (k - q)

    stock = create_block_mask(functools.partial(mask_mod, limits), BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    stock.mask_mod = functools.partial(mask_mod, limits_d)
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(1, -1, 1, 1)
    rows, keys = torch.arange(LENGTH).view(1, 1, -1, 1), torch.arange(LENGTH).view(1, 1, 1, -1)
    dense = mask_mod(limits, b, h, rows, keys)
    for placements, kv_heads in layouts[: 1 if compiled else None]:
        x = operands(kv_heads=kv_heads)
        expected = dense_attention_with_gradients(*x, mask_BHQK=dense, score_mod=functools.partial(score_mod, slopes))
        leaves = []
        for i, t in enumerate(x[:3]):
            of_t = [Replicate() if p == Shard(1) and i and kv_heads == 1 else p for p in placements]
            leaves.append(distribute_tensor(t, device_mesh, of_t).detach().requires_grad_())
        out = attend(*leaves, block_mask=stock, score_mod=functools.partial(score_mod, slopes_d), enable_gqa=True)
        assert list(out.placements) == placements
        out.backward(distribute_tensor(x[3], device_mesh, placements))
        for leaf in leaves:
            assert leaf.grad.placements == leaf.placements
        check(out, leaves, expected, DTensor.full_tensor)


@pytest.mark.parametrize("compiled", [False, True])
def test_batch_and_heads(world: World, compiled: bool) -> None:
    world.run(check_batch_and_heads, 4, compiled)


def check_ranks_without_rows(group: dist.ProcessGroup) -> None:
    """Fewer queries than ranks, and a reader of the result without elements, for which a compiler would drop the op."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(group.size(), names=("cp",))
    q_len, kv_len = 1, 64
    x = [t[:, :, :n] for t, n in zip(operands(), (q_len, kv_len, kv_len, q_len), strict=True)]
    x[1:3] = [torch.cat((t, t.flip(2)), 2)[:, :, :kv_len] for t in operands()[1:3]]
    cp = ContextParallel(device_mesh, RowIntervals.full(q_len, kv_len))
    expected = dense_attention_with_gradients(*x, mask_BHQK=torch.ones(1, 1, q_len, kv_len, dtype=torch.bool))
    attend = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=cp.block_mask, enable_gqa=True) * 2)
    leaves = [cp.shard(distribute_tensor(t, device_mesh, [Replicate()]), 2) for t in x[:3]]
    with torch.no_grad():
        assert_same(cp.unshard(attend(*leaves), 2), 2 * expected.out)
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = attend(*leaves) / 2
    out.backward(cp.shard(distribute_tensor(x[3], device_mesh, [Replicate()]), 2))
    check(out, leaves, expected, lambda t: cp.unshard(t, 2))
    strides = [None] * group.size()
    dist.all_gather_object(strides, [t.stride() for t in (out, *(leaf.grad for leaf in leaves))], group=group)
    assert strides == strides[:1] * group.size()


def test_ranks_without_rows(world: World) -> None:
    world.run(check_ranks_without_rows, 2)


def check_shared_cache(group: dist.ProcessGroup, folder: str) -> None:
    """Names of process groups differ between ranks, and ranks on one host share Inductor's folder."""
    magi_flex.enable()
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    x = operands(kv_heads=1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = dense_attention_with_gradients(*x, mask_BHQK=mask[None, None])
    block_mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, LENGTH, LENGTH, device="cpu")
    cache = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    for _ in range(2):
        torch._dynamo.reset()
        leaves = [
            distribute_tensor(t, device_mesh, [Shard(0), Replicate() if i else Shard(1)]).detach().requires_grad_()
            for i, t in enumerate(x[:3])
        ]
        with cache:
            attend = torch.compile(flex_attention, fullgraph=True)
            out = attend(*leaves, block_mask=block_mask, enable_gqa=True)
            out.backward(distribute_tensor(x[3], device_mesh, out.placements))
        check(out, leaves, expected, DTensor.full_tensor)
        dist.barrier(group)


def test_ranks_that_share_a_compile_cache(world: World, tmp_path: Path) -> None:
    world.run(check_shared_cache, 4, str(tmp_path))


def place(cp: ContextParallel, x: Tensor, over: dict[int, int]) -> DTensor:
    """Sharded over the sequence and, for mesh dimension -> tensor dimension of ``over``, over batch or heads."""
    placements = [Replicate()] * cp.mesh.ndim
    for mesh_dim, dim in over.items():
        placements[mesh_dim] = Shard(dim)
    return cp.shard(distribute_tensor(x, cp.mesh, placements), 2)


def check_three_dimensions(group: dist.ProcessGroup, compiled: bool) -> None:
    """DP x CP x TP, a mask that depends on batch and head, a score mod that sees global positions, batch and heads."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(2, 2, 2, names=("dp", "cp", "tp"))
    slopes = torch.tensor([0.1, 0.5, 1.0, 2.0])
    slopes_d = distribute_tensor(slopes, device_mesh, [Replicate()] * 3)

    def score_mod(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] * (k - q) + 0.01 * b * (q % 7)

    attend = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    row = torch.arange(LENGTH, dtype=torch.int32)
    width = torch.arange(1, BATCH * HEADS + 1, dtype=torch.int32).view(BATCH, HEADS, 1, 1) * 3
    mask = RowIntervals.build(row - width, (row + 1).expand(BATCH, HEADS, 1, LENGTH), LENGTH)
    cp = ContextParallel(device_mesh, mask, dim="cp", forward_stages=2)
    x = operands()
    expected = dense_attention_with_gradients(
        *x, mask_BHQK=mask.to_dense(), score_mod=functools.partial(score_mod, slopes)
    )
    leaves = [place(cp, t, {0: 0, 2: 1}).detach().requires_grad_() for t in x[:3]]
    out = attend(*leaves, block_mask=cp.block_mask, score_mod=functools.partial(score_mod, slopes_d), enable_gqa=True)
    assert out.placements == (Shard(0), Shard(2), Shard(1))
    out.backward(place(cp, x[3], {0: 0, 2: 1}))
    check(out, leaves, expected, lambda t: cp.unshard(t, 2))


@pytest.mark.parametrize("compiled", [False, True])
def test_dp_cp_tp(world: World, compiled: bool) -> None:
    world.run(check_three_dimensions, 8, compiled)


def check_learned_score(group: dist.ProcessGroup, compiled: bool) -> None:
    """Gradients of what a score mod captures are summed over the ranks that share the sequence."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(group.size(), names=("cp",))
    mask = document_mask([20, 28])
    cp = ContextParallel(device_mesh, mask)
    table = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(9))
    x = operands()
    exact = table.clone().double().requires_grad_()

    def score_mod(table: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k + LENGTH]

    expected = dense_attention_with_gradients(
        *x, mask_BHQK=mask.to_dense(), score_mod=functools.partial(score_mod, exact), captures=(exact,)
    )
    leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
    learned = distribute_tensor(table, device_mesh, [Replicate()]).detach().requires_grad_()

    def attend(q, k, v, table, block_mask):
        mod = functools.partial(score_mod, table)
        return flex_attention(q, k, v, score_mod=mod, block_mask=block_mask, enable_gqa=True)

    function = torch.compile(attend, fullgraph=True) if compiled else attend
    out = function(*leaves, learned, cp.block_mask)
    out.backward(cp.shard(x[3], 2))
    check(out, leaves, expected, lambda t: cp.unshard(t, 2))
    assert_same(learned.grad.full_tensor(), expected.captures[0], "table")


@pytest.mark.parametrize("compiled", [False, True])
def test_learned_score_mod(world: World, compiled: bool) -> None:
    world.run(check_learned_score, 2, compiled)


def check_compiled_training(group: dist.ProcessGroup) -> list[str]:
    """Two layers with two masks, new masks each step: one compilation, the same graph on every rank; selective
    checkpointing saves the attention, so that each layer's runs once."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(group.size(), names=("cp",))
    counter = CompileCounterWithBackend("inductor")
    graphs: list[str] = []

    def backend(module, inputs):
        graphs.append(module.print_readable(print_output=False))
        return counter(module, inputs)

    save = [torch.ops.higher_order.flex_attention]

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v, masks):
        for mask in masks:
            q = q + flex_attention(q, k, v, block_mask=mask, enable_gqa=True).sin()
        return q

    def layers(q, k, v, masks):
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, q, k, v, masks, use_reentrant=False, context_fn=context)

    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    for step in range(STEPS):
        lengths = draw_document_lengths(LENGTH, step, ((1, LENGTH, 1),))
        masks = [document_mask(lengths), document_mask(lengths, window=6)]
        cut, first = (("keys", "forward local"), ("heads", f"forward heads 0:{HEADS}"))[step % 2]
        cp = ContextParallel(device_mesh, masks, cut=cut, forward_stages=1)
        x = operands(step)
        exact = [t.double().requires_grad_() for t in x[:3]]
        expected = exact[0]
        for mask in masks:
            key_heads = [t.repeat_interleave(HEADS // KV_HEADS, 1) for t in exact[1:]]
            scores = expected @ key_heads[0].transpose(2, 3) / math.sqrt(DIM)
            weights = scores.masked_fill(~mask.to_dense(), -math.inf).softmax(-1)
            expected = expected + (weights @ key_heads[1]).sin()
        expected.backward(x[3].double())
        cp.timeline = Timeline()
        leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
        out = compiled(*leaves, cp.block_masks)
        out.backward(cp.shard(x[3], 2))
        assert [span.name for span in cp.timeline.spans()].count(first) == len(masks)
        assert_same(cp.unshard(out, 2), expected.detach(), f"step {step} out")
        for leaf, e in zip(leaves, exact, strict=True):
            assert_same(cp.unshard(leaf.grad, 2), e.grad, f"step {step} gradient")
        assert counter.frame_count == 1, f"step {step}: {counter.frame_count} compilations"
    return graphs


def test_compiled_training_does_not_recompile(world: World) -> None:
    graphs = world.run(check_compiled_training, 2)
    assert graphs[0] == graphs[1]


def check_errors(group: dist.ProcessGroup) -> None:
    device_mesh = mesh(group.size(), names=("cp",))
    cp = ContextParallel(device_mesh, document_mask([20, 28]))
    q, k, v, _ = (cp.shard(t, 2) for t in operands())
    plain = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    magi_flex.enable()
    with pytest.raises(Exception, match="must be a ContextParallel's block_mask"):
        flex_attention(q, k, v, block_mask=plain, enable_gqa=True)
    with pytest.raises(Exception, match="ContextParallel.shard"):
        whole = [distribute_tensor(t, device_mesh, [Replicate()]) for t in operands()[:3]]
        flex_attention(*whole, block_mask=cp.block_mask, enable_gqa=True)
    with pytest.raises(Exception, match="cannot be left to PyTorch"):
        flex_attention(q, k, v, block_mask=cp.block_mask, enable_gqa=True, kernel_options={"magi_backend": "stock"})
    magi_flex.disable()
    with pytest.raises(Exception, match="magi_flex.enable"):
        flex_attention(q, k, v, block_mask=cp.block_mask, enable_gqa=True)
    magi_flex.enable()
    with pytest.raises(ValueError, match="forward_stages: got 0"):
        ContextParallel(device_mesh, document_mask([4]), forward_stages=0)
    with pytest.raises(ValueError, match="must divide the 2 ranks"):
        ContextParallel(device_mesh, document_mask([4]), ranks_per_node=3)
    with pytest.raises(ValueError, match="at least one mask"):
        ContextParallel(device_mesh, [])
    with pytest.raises(ValueError, match="must be equal to share a dispatch"):
        ContextParallel(device_mesh, [document_mask([4]), document_mask([5])])
    with pytest.raises(ValueError, match=r"masks: ranks \[1\] were given something else"):
        ContextParallel(device_mesh, document_mask([4, 2 + group.rank()]))
    with pytest.raises(ValueError, match=r"masks: ranks \[1\] were given something else"):
        ContextParallel(device_mesh, document_mask([4]), forward_stages=1 + group.rank())
    with pytest.raises(ValueError, match="x: has length 7"):
        cp.shard(torch.zeros(7), 0)
    with pytest.raises(ValueError, match="dim: got 'tp'"):
        ContextParallel(device_mesh, document_mask([4]), dim="tp")


def test_errors(world: World) -> None:
    world.run(check_errors, 2)


def check_own_tensor_of_a_handles_shape(group: dist.ProcessGroup) -> None:
    """A mask of the user's own that captures an int64 [1, 1, 4] is that mask, wherever it goes."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(group.size(), names=("tp",))
    limits = torch.tensor([[[20, 0, 0, 0]]])

    def mask_mod(limits: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < limits[0, 0, 0])

    mask = create_block_mask(functools.partial(mask_mod, limits), None, None, LENGTH, LENGTH, device="cpu")
    row = torch.arange(LENGTH)
    dense = mask_mod(limits, row, row, row[:, None], row)[None, None]
    x = operands()
    expected = dense_attention_with_gradients(*x, mask_BHQK=dense)
    for options in ({}, {"magi_backend": "stock"}):
        for attend in (flex_attention, torch.compile(flex_attention, fullgraph=True)):
            out = attend(*x[:3], block_mask=mask, enable_gqa=True, kernel_options=options)
            assert_same(out, expected.out, str(options))
    mask.mask_mod = functools.partial(mask_mod, distribute_tensor(limits, device_mesh, [Replicate()]))
    leaves = [distribute_tensor(t, device_mesh, [Shard(1)]).detach().requires_grad_() for t in x[:3]]
    out = flex_attention(*leaves, block_mask=mask, enable_gqa=True)
    out.backward(distribute_tensor(x[3], device_mesh, [Shard(1)]))
    check(out, leaves, expected, DTensor.full_tensor)
    cp = ContextParallel(device_mesh, document_mask([LENGTH]))
    with pytest.raises(Exception, match="must be a ContextParallel's block_mask"):
        flex_attention(*(cp.shard(t, 2) for t in x[:3]), block_mask=mask, enable_gqa=True)


def test_own_tensor_of_a_handles_shape(world: World) -> None:
    world.run(check_own_tensor_of_a_handles_shape, 2)


def check_other_interval_counts(group: dist.ProcessGroup) -> None:
    """One function, masks of one, two and four intervals a row: Dynamo does not see that shapes of DTensors changed."""
    magi_flex.enable()
    torch._dynamo.reset()
    device_mesh = mesh(group.size(), names=("cp",))
    x = operands()
    row = torch.arange(LENGTH)
    attend = torch.compile(flex_attention, fullgraph=True)
    for distances in ([0], [0, 9], [0, 4, 9, 20], [0, 9]):
        dense = torch.stack([row[:, None] - row == d for d in distances]).any(0)[None, None]
        expected = dense_attention_with_gradients(*x, mask_BHQK=dense)
        intervals = RowIntervals.from_dense(dense)
        whole = magi_flex.create_block_mask(
            lambda b, h, q, k, table=dense[0, 0]: table[q, k], None, None, LENGTH, LENGTH
        )
        plan = CanonicalMaskMod.from_plan(MaskPlan(intervals))
        starts, ends = (distribute_tensor(t, device_mesh, [Replicate()]) for t in (plan.starts, plan.ends))
        whole.mask_mod = CanonicalMaskMod(starts, ends, LENGTH)
        cp = ContextParallel(device_mesh, intervals)
        for function in (flex_attention, attend):
            out = function(*(cp.shard(t, 2) for t in x[:3]), block_mask=cp.block_mask, enable_gqa=True)
            assert_same(cp.unshard(out, 2), expected.out, f"sequence, {len(distances)}")
            heads = [distribute_tensor(t, device_mesh, [Shard(1)]) for t in x[:3]]
            out = function(*heads, block_mask=whole, enable_gqa=True)
            assert_same(out.full_tensor(), expected.out, f"heads, {len(distances)}")


def test_other_interval_counts(world: World) -> None:
    world.run(check_other_interval_counts, 2)


def check_combined_masks(group: dist.ProcessGroup) -> None:
    """What a ContextParallel's mask_mod was combined with cannot be lost: an error, eager and compiled."""
    magi_flex.enable()
    torch._dynamo.reset()
    cp = ContextParallel(mesh(group.size(), names=("cp",)), document_mask([LENGTH]))
    ours = cp.block_mask
    for combine in (and_masks, or_masks):
        mask = BlockMask(
            ours.seq_lengths,
            *(ours.kv_num_blocks, ours.kv_indices, None, None),
            *(ours.q_num_blocks, ours.q_indices, None, None),
            BLOCK_SIZE=ours.BLOCK_SIZE,
            mask_mod=combine(ours.mask_mod, lambda b, h, q, k: k <= q),
        )
        for attend in (flex_attention, torch.compile(flex_attention, fullgraph=True)):
            with pytest.raises(Exception, match="combines the mask_mod of a ContextParallel"):
                attend(*(cp.shard(t, 2) for t in operands()[:3]), block_mask=mask, enable_gqa=True)


def test_combined_masks_are_refused(world: World) -> None:
    world.run(check_combined_masks, 2)


def check_other_mesh_dimension(group: dist.ProcessGroup) -> None:
    """The sequence must be shared by the ranks that the plans were made for; shard sizes would not tell."""
    magi_flex.enable()
    device_mesh = mesh(2, 2, names=("dp", "cp"))
    cp = ContextParallel(device_mesh, document_mask([LENGTH]), dim="cp")
    x = [distribute_tensor(t, device_mesh, [Shard(2), Replicate()]) for t in operands()[:3]]
    with pytest.raises(Exception, match=r"query: ranks \[\d, \d\] share its sequence, but .* was made for ranks"):
        flex_attention(*x, block_mask=cp.block_mask, enable_gqa=True)


def test_sequence_on_another_mesh_dimension(world: World) -> None:
    world.run(check_other_mesh_dimension, 4)


def test_handle_is_known_in_every_form() -> None:
    """torch 2.11 writes a comparison of DTensors as a method; an operator of aten is a function."""
    for op, target in (("call_method", "__eq__"), ("call_function", torch.ops.aten.eq.Scalar)):
        graph = fx.Graph()
        arguments = [graph.placeholder(name) for name in ("b", "h", "q", "k", "other", "handle")]
        first = graph.call_function(operator.getitem, (arguments[-1], (0, 0, 0)))
        compared = graph.create_node(op, target, (first, HANDLE_MAGIC))
        graph.output(graph.call_function(operator.and_, (compared, arguments[-2])))
        assert find_handle(fx.GraphModule({}, graph), [None, None]) == 1
