"""ContextParallel on gloo: the same results as one rank, eager and compiled, on meshes of one to three dimensions."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import magi_flex
from magi_flex.distributed import context_mask, context_ops
from magi_flex.distributed.context_parallel import ContextParallel
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.timeline import NETWORK, Timeline
from magi_flex.distributed.workloads import document_mask, draw_document_lengths
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from tests.cases.masks import MASKS, make_mask
from tests.cases.reference import dense_attention_with_gradients
from tests.distributed.world import World, mesh

DIM = 16


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return mesh(group.size(), names=("cp",))


def operands(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dtype=torch.float64) -> list[Tensor]:
    """q, k, v, d_out; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, n, s, DIM) for n, s in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check_call(cp: ContextParallel, x: list[Tensor], dense: Tensor, attend=flex_attention, mask=None, **kwargs) -> None:
    expected = dense_attention_with_gradients(*x, mask_BHQK=dense)
    leaves = [cp.shard(t, 2).detach().requires_grad_() for t in x[:3]]
    mask = cp.block_mask if mask is None else mask
    out, lse = attend(*leaves, block_mask=mask, enable_gqa=True, return_lse=True, **kwargs)
    out.backward(cp.shard(x[3], 2))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if x[0].dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(cp.unshard(out, 2), expected.out, check_dtype=False, **tolerance)
    natural = (expected.lse * torch.log(torch.tensor(2.0))).to(lse.dtype)
    torch.testing.assert_close(cp.unshard(lse, 2), natural, rtol=1e-5, atol=1e-5)
    for leaf, grad in zip(leaves, (expected.dq, expected.dk, expected.dv), strict=True):
        assert leaf.grad.placements == leaf.placements
        torch.testing.assert_close(cp.unshard(leaf.grad, 2), grad, check_dtype=False, **tolerance)


def check_eager(group: dist.ProcessGroup, names: list[str]) -> None:
    magi_flex.enable()
    cp_mesh = mesh_of(group)
    for name in names:
        q_len, kv_len = (53, 53) if name != "jagged" else (53, 40)
        case = make_mask(name, q_len, kv_len)
        dense = case.dense()
        batch, heads = max(2, case.batch), max(4, case.heads)
        heads += heads % 2
        if case.batch not in (1, batch) or case.heads not in (1, heads):
            continue
        cp = ContextParallel(cp_mesh, MaskPlan.from_dense(dense), forward_stages=2)
        check_call(cp, operands(batch, heads, heads // 2, q_len, kv_len), dense)


@pytest.mark.parametrize("ranks", [1, 3])
def test_masks_eager(world: World, ranks: int) -> None:
    world.run(check_eager, ranks, list(MASKS)[:: 9 if ranks == 1 else 3])


def check_any_length(group: dist.ProcessGroup) -> None:
    """Uneven shards, ranks without rows, 30 heads; documents of 4 and 3 tokens padded to 10."""
    magi_flex.enable()
    cp_mesh = mesh_of(group)
    for length in (1, 5, 129) if group.size() == 4 else (2,):
        mask = document_mask(draw_document_lengths(length, 0, ((1, 20, 1),)))
        cp = ContextParallel(cp_mesh, mask)
        assert [len(cp.dispatch.rows(r)) for r in range(group.size())] == [
            len(x) for x in _padded(torch.arange(length).chunk(group.size()), group.size())
        ]
        check_call(cp, operands(1, 30, 6, length, length), mask.to_dense())
    packed = document_mask([4, 3])
    padded = RowIntervals.build(
        torch.nn.functional.pad(packed.starts, (0, 3)), torch.nn.functional.pad(packed.ends, (0, 3)), 10
    )
    cp = ContextParallel(cp_mesh, padded)
    check_call(cp, operands(1, 2, 2, 10, 10), padded.to_dense())


def _padded(chunks: tuple[Tensor, ...], ranks: int) -> list[Tensor]:
    return [*chunks, *[torch.zeros(0)] * (ranks - len(chunks))]


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_length_and_head_count(world: World, ranks: int) -> None:
    world.run(check_any_length, ranks)


def check_sequence_tools(group: dist.ProcessGroup) -> None:
    cp_mesh = mesh_of(group)
    for length in (1, 7, 64, 101):
        mask = RowIntervals.from_dense(make_mask("causal", length).dense())
        cp = ContextParallel(cp_mesh, mask)
        x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sharded = cp.shard(x, 1)
        assert isinstance(sharded, DTensor) and sharded.shape == x.shape and sharded.placements == (Shard(1),)
        assert torch.equal(sharded.to_local(), x[:, cp.rows])
        assert torch.equal(cp.unshard(sharded, 1), x)
        assert torch.equal(cp.unshard(sharded.to_local(), 1), x)
        assert torch.equal(cp.unshard(cp.position_ids, 0), torch.arange(length))
        for shift in (-1, 1, -3, length + 2):
            assert torch.equal(cp.unshard(cp.roll(sharded, 1, shift), 1), torch.roll(x, shift, 1))
            assert torch.equal(cp.roll(sharded.to_local(), 1, shift), torch.roll(x, shift, 1)[:, cp.rows])
        leaf = sharded.detach().requires_grad_()
        weight = torch.arange(x.numel(), dtype=torch.float64).view_as(x)
        (cp.unshard(leaf, 1) * weight).sum().backward()
        assert torch.equal(cp.unshard(leaf.grad, 1), weight)
        ids = torch.arange(length)
        assert torch.equal(cp.unshard(cp.roll(cp.shard(ids, 0), 0), 0), torch.roll(ids, -1))


def check_gradient_and_placements(group: dist.ProcessGroup) -> None:
    """The gradient of a replicated tensor is its whole gradient; other placements or lengths fail on every rank."""
    cp_mesh = mesh_of(group)
    cp = ContextParallel(cp_mesh, document_mask([7]))
    weight = torch.arange(42.0).view(2, 7, 3)
    x = distribute_tensor(torch.ones(2, 7, 3), cp_mesh, [Replicate()]).requires_grad_()
    (cp.unshard(cp.shard(x, 1), 1) * weight).sum().backward()
    assert torch.equal(x.grad.redistribute(cp_mesh, [Replicate()]).to_local(), weight)
    for wrong in (x, distribute_tensor(torch.ones(2, 7, 3), cp_mesh, [Shard(2)])):
        for tool in (cp.unshard, cp.roll):
            with pytest.raises(ValueError, match="must be sharded along dimension 1"):
                tool(wrong, 1)
    with pytest.raises(ValueError, match="whole along dimension 1"):
        cp.shard(cp.shard(x, 1), 1)
    # On three ranks 5 queries and 6 keys are 2 rows each but on the last one: it must not be the only one to raise.
    cp = ContextParallel(cp_mesh, RowIntervals.full(5, 6))
    with pytest.raises(ValueError, match="x: has length 6 in dimension 0; the masks have 5 queries"):
        cp.roll(cp.shard(torch.arange(6), 0), 0)


def test_gradient_of_shard_and_wrong_placements(world: World) -> None:
    world.run(check_gradient_and_placements, 3)


def check_learned_table_without_rows(group: dist.ProcessGroup) -> None:
    """A rank without rows adds the gradient of a transposed table as the others do (2, 2 and no row)."""
    magi_flex.enable()
    cp_mesh = mesh_of(group)
    length, heads = 4, 2
    mask = document_mask([length])
    cp = ContextParallel(cp_mesh, mask)
    x = operands(1, heads, heads, length, length)
    table = torch.randn(2 * length, heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score_mod(table_HT: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table_HT[h, q - k + length]

    exact = table.clone().requires_grad_()
    expected = dense_attention_with_gradients(
        *x, mask_BHQK=mask.to_dense(), score_mod=functools.partial(score_mod, exact.t()), captures=(exact,)
    )
    learned = distribute_tensor(table.float(), cp_mesh, [Replicate()]).requires_grad_()
    leaves = [cp.shard(t, 2) for t in x[:3]]
    mod = functools.partial(score_mod, learned.t())
    flex_attention(*leaves, score_mod=mod, block_mask=cp.block_mask).backward(cp.shard(x[3], 2))
    grad = learned.grad.full_tensor().double()
    torch.testing.assert_close(grad, expected.captures[0], rtol=1e-4, atol=1e-4)


def test_learned_table_without_rows(world: World) -> None:
    world.run(check_learned_table_without_rows, 3)


def check_mask_of_another_batch(group: dist.ProcessGroup) -> None:
    magi_flex.enable()
    cp = ContextParallel(mesh_of(group), RowIntervals.from_dense(torch.ones(2, 1, 6, 6, dtype=torch.bool)))
    x = [cp.shard(t, 2) for t in operands(1, 2, 2, 6, 6)[:3]]
    with pytest.raises(ValueError, match="is for 2 batch entries and 1 heads, but the query has 1 and 2"):
        flex_attention(*x, block_mask=cp.block_mask)


def test_mask_of_another_batch(world: World) -> None:
    world.run(check_mask_of_another_batch, 2)


def test_shard_unshard_roll(world: World) -> None:
    world.run(check_sequence_tools, 3)


def check_alternating(group: dist.ProcessGroup) -> None:
    """Two masks share a dispatch; stages chosen, set, kept keys; two levels; cross-attention lengths."""
    magi_flex.enable()
    cp_mesh = mesh_of(group)
    length = 96
    dense = [make_mask(name, length).dense() for name in ("causal", "sliding_window")]
    masks = [RowIntervals.from_dense(x) for x in dense]
    x = operands(1, 4, 2, length, length)
    for options in ({}, {"keep_keys": True, "forward_stages": 3}, {"ranks_per_node": 2, "backward_stages": 2}):
        cp = ContextParallel(cp_mesh, masks, **options)
        assert cp.imbalance < 1.1
        for block_mask, d in zip(cp.block_masks, dense, strict=True):
            check_call(cp, x, d, mask=block_mask)
    with pytest.raises(ValueError, match="there are 2 masks"):
        _ = cp.block_mask
    check_kept_keys(cp_mesh)
    check_few_queries(cp_mesh)
    case = make_mask("lower_right_causal", 40, 72).dense()
    cp = ContextParallel(cp_mesh, RowIntervals.from_dense(case), forward_stages=2)
    expected = dense_attention_with_gradients(*operands(1, 4, 2, 40, 72), mask_BHQK=case)
    q, k, v, d_out = operands(1, 4, 2, 40, 72)
    out = flex_attention(cp.shard(q, 2), cp.shard(k, 2), cp.shard(v, 2), block_mask=cp.block_mask, enable_gqa=True)
    torch.testing.assert_close(cp.unshard(out, 2), expected.out)


def check_kept_keys(cp_mesh: DeviceMesh) -> None:
    """Kept keys do not travel a second time, others do."""
    dense = make_mask("causal", 96).dense()
    for keep_keys, casts in ((False, 4), (True, 2)):
        cp = ContextParallel(
            cp_mesh, RowIntervals.from_dense(dense), keep_keys=keep_keys, forward_stages=2, backward_stages=2
        )
        cp.timeline = Timeline()
        check_call(cp, operands(1, 4, 2, 96, 96), dense)
        spans = cp.timeline.spans()
        assert [span.lane for span in spans].count(NETWORK) == casts, [(span.name, span.lane) for span in spans]


def check_few_queries(cp_mesh: DeviceMesh) -> None:
    """Few rows over many keys: queries move to the keys, if that is left open."""
    dense = make_mask("lower_right_causal", 6, 500).dense()
    for move in ("auto", "keys"):
        cp = ContextParallel(cp_mesh, RowIntervals.from_dense(dense), move=move)
        check_call(cp, operands(1, 2, 2, 6, 500), dense)
        plans = cp.masks[0]._plans.values()
        assert all((plan.visiting is not None) == (move == "auto") for plan in plans) and plans


def check_plans_are_bounded(group: dist.ProcessGroup) -> None:
    """A mask that outlives many shapes (here each is planned apart, by a collective) does not hold all their plans."""
    dense = make_mask("lower_right_causal", 6, 500).dense()
    mask = ContextParallel(mesh_of(group), RowIntervals.from_dense(dense)).masks[0]
    shapes = [Shape(2, 2, DIM, DIM, batch) for batch in range(1, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_mask, "_MOST_PLANS", 3)
        patch.setattr(context_mask, "_MOST_CALLS", 2)
        for shape in (*shapes, *shapes):
            assert mask.plan(shape, False) is mask.plan(shape, False)
            assert len(mask._plans) <= 3 and len(mask._plan_of_call) <= 2


def test_plans_are_bounded(world: World) -> None:
    world.run(check_plans_are_bounded, 2)


def test_kept_keys_go_with_their_pass() -> None:
    """Also where no backward pass asks for them, once another one asks for its own."""
    passes = [torch.zeros(3) for _ in range(2)]
    for lse in passes:
        context_ops._keep(lse, [[lse + 1]])
    del lse, passes[0]
    assert context_ops._take_kept(torch.zeros(3)) is None
    assert len(context_ops._kept) == 1 and context_ops._take_kept(passes[0]) is not None
    assert not context_ops._kept


def test_masks_that_alternate_and_options(world: World) -> None:
    world.run(check_alternating, 4)


def check_block_size(group: dist.ProcessGroup) -> None:
    """A stock BlockMask keeps its block size (here 256), and its meaning."""
    magi_flex.enable()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu", BLOCK_SIZE=256)
    cp = ContextParallel(mesh_of(group), mask)
    assert isinstance(cp.block_mask, BlockMask) and cp.block_mask.BLOCK_SIZE == (256, 256)
    check_call(cp, operands(1, 2, 1, 512, 512), torch.ones(512, 512, dtype=torch.bool).tril()[None, None])


def test_block_size_is_kept(world: World) -> None:
    world.run(check_block_size, 2)
