"""Cases that cost FlexAttention's users time, end to end with our kernels; each is named after what went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as stock
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import magi_flex
from tests.cases.reference import assert_within_factor, dense_attention
from tests.compiling import attend, check_training, qkv


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    with magi_flex.enable(), torch._dynamo.config.patch(recompile_limit=100):
        yield


@pytest.fixture(scope="module")
def compiled() -> Any:
    return torch.compile(attend, fullgraph=True, dynamic=True)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def dense(mask_mod: Any, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    grid = (torch.arange(n) for n in (batch, heads, q_len, kv_len))
    return mask_mod(*torch.meshgrid(*grid, indexing="ij"))


@pytest.mark.parametrize("position", [0, 300, 511])
def test_decoding_one_row(compiled: Any, position: int) -> None:
    """The rows of one query tile of a causal mask, one query at an offset: equal to the dense row."""
    whole = stock.create_block_mask(causal, 4, None, 512, 512, device="cpu")
    tile = position // 128
    row = whole[:, :, tile]
    offset = torch.tensor(position)
    row.mask_mod = lambda b, h, q, k: causal(b, h, q + offset, k)
    row.seq_lengths = (1, 512)
    q, k, v = qkv(batch=4, q_len=512)
    mask = causal(*(None,) * 2, torch.arange(512)[:, None], torch.arange(512))[position]
    check_training(compiled, (q.detach()[:, :, position : position + 1].requires_grad_(), k, v), mask, row)


@pytest.mark.parametrize("sizes", [(None, None), (4, None), (None, 8), (4, 8)])
def test_masks_broadcast_over_batch_and_heads(compiled: Any, sizes: tuple[int | None, int | None]) -> None:
    limit = torch.randint(1, 40, (sizes[0] or 1, sizes[1] or 1))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < limit[b if sizes[0] else 0, h if sizes[1] else 0]

    mask = stock.create_block_mask(mask_mod, *sizes, 40, 40, device="cpu")
    wanted = torch.arange(40) < limit[..., None, None]
    check_training(compiled, qkv(batch=4, heads=8, q_len=40), wanted, mask)


def test_mask_of_another_length_is_refused_or_cropped() -> None:
    """Longer and shorter masks raise; _adjust crops to the upper left corner, with our masks too."""
    for make in (stock.create_block_mask, magi_flex.create_block_mask):
        for mask_q, mask_kv, length in ((4096, 4096, 2048), (128, 256, 2), (100, 100, 200)):
            mask = make(causal, 2, None, mask_q, mask_kv, device="cpu")
            with pytest.raises(ValueError, match="block_mask was created for"):
                attend(*qkv(q_len=length), None, mask)
        cropped = make(causal, 2, None, 300, 300, device="cpu")._adjust(140, 140)
        check_training(attend, qkv(q_len=140), dense(causal, 1, 1, 140, 140), cropped)


def test_mask_mod_is_never_asked_beyond_the_lengths(compiled: Any) -> None:
    """2046 tokens, no multiple of a block; the mask reads a captured bool[2046]."""
    keep = torch.rand(2046) < 0.7

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return keep[q] & keep[k] & (q >= k)

    mask = magi_flex.create_block_mask(mask_mod, None, None, 2046, 2046, device="cpu")
    inputs = qkv(batch=1, heads=1, kv_heads=1, q_len=2046)
    check_training(compiled, inputs, dense(mask_mod, 1, 1, 2046, 2046), mask)


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
def test_an_example_that_is_all_padding(compiled: Any, make: Any) -> None:
    lengths = torch.tensor([30, 0, 7])
    mask = make(lambda b, h, q, k: k < lengths[b], 3, None, 40, 40, device="cpu")
    inputs = qkv(batch=3, q_len=40)
    out = check_training(compiled, inputs, torch.arange(40) < lengths.view(3, 1, 1, 1), mask)
    assert (out[1] == 0).all()
    _, aux = torch.compile(attend, fullgraph=True)(*inputs, None, mask, return_aux=stock.AuxRequest(lse=True))
    assert (aux.lse[1] == -math.inf).all()
    grads = torch.autograd.grad(attend(*inputs, None, mask).square().sum(), inputs)
    assert all((grad[1] == 0).all() for grad in grads)


def test_learned_scalar_gets_its_whole_gradient() -> None:
    scale = torch.tensor(0.7, requires_grad=True)
    exact = scale.detach().double().requires_grad_()
    inputs = qkv(batch=1, heads=2, kv_heads=1, q_len=1500)
    check_training(
        torch.compile(attend, fullgraph=True),
        inputs,
        None,
        None,
        lambda s, b, h, q, k: s * scale,
        lambda s, b, h, q, k: s * exact,
        [scale],
        [exact],
    )
    out = attend(*inputs, lambda s, b, h, q, k: 0.1 * k + 0 * s)
    for grad in torch.autograd.grad(out.square().sum(), inputs[:2]):
        assert (grad == 0).all()


def test_captured_lengths_do_not_compile_again() -> None:
    """Lower-right causal, whose offset changes with the lengths: at most two compilations, then none."""
    counter = CompileCounterWithBackend("inductor")

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return attend(q, k, v, None, mask)

    function = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)

    def lower_right(offset: int) -> Any:
        return lambda b, h, q, k: k <= q + offset

    frames = []
    for q_len, kv_len in ((130, 260), (140, 300), (200, 333), (150, 190)):
        offset = kv_len - q_len
        mask = stock.create_block_mask(lower_right(offset), None, None, q_len, kv_len, device="cpu")
        wanted = torch.arange(kv_len) <= torch.arange(q_len)[:, None] + offset
        check_training(lambda q, k, v, _, m: function(q, k, v, m), qkv(q_len=q_len, kv_len=kv_len), wanted, mask)
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1] <= 2


def test_hand_built_lists_decide_alone(compiled: Any) -> None:
    """Partial and full lists with a trivial mask_mod, forward and backward, lengths that end inside a block."""
    partial = [[0], [2, 1], []]
    full = [[], [0], [1]]
    sizes, width = (3, 3), 3

    def lists(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        count = torch.tensor([len(row) for row in rows], dtype=torch.int32).view(1, 1, 3)
        padded = [row + [0] * (width - len(row)) for row in rows]
        return count, torch.tensor(padded, dtype=torch.int32).view(1, 1, 3, width)

    mask = stock.BlockMask.from_kv_blocks(*lists(partial), *lists(full), BLOCK_SIZE=16, seq_lengths=(40, 45))
    blocks = torch.zeros(sizes, dtype=torch.bool)
    for row, cols in enumerate(zip(partial, full, strict=True)):
        blocks[row, [*cols[0], *cols[1]]] = True
    wanted = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)[:40, :45]
    for function in (compiled, attend):
        check_training(function, qkv(q_len=40, kv_len=45), wanted, mask)


@pytest.mark.parametrize("make", [stock.create_block_mask, magi_flex.create_block_mask], ids=["stock", "ours"])
def test_masks_that_depend_on_the_batch_compile_once(make: Any) -> None:
    """Parity of b, and a table by b; the batch varies and the last one is short."""
    counter = CompileCounterWithBackend("inductor")
    function = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    for batch in (4, 3, 5, 2):
        lengths = torch.randint(1, 150, (batch,))

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, lengths: Tensor = lengths) -> Tensor:
            return (k < lengths[b]) & ((b % 2 == 0) | (q >= k))

        mask = make(mask_mod, batch, None, 150, 150, device="cpu")
        check_training(function, qkv(batch=batch, q_len=150), dense(mask_mod, batch, 1, 150, 150), mask)
    assert counter.frame_count == 1


@pytest.mark.parametrize("length", [196, 257])
def test_fake_and_real_strides_agree(length: int) -> None:
    """The compiler relies on the strides that it was promised, forward and backward."""

    def step(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        return attend(*heads).transpose(1, 2).flatten(2).square()

    x = torch.randn(1, length, 16)
    weight = (torch.randn(16, 1536) / 4).requires_grad_()
    out = torch.compile(step, fullgraph=True)(x, weight)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    exact = weight.detach().double().requires_grad_()
    heads = (x.double() @ exact).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
    right = dense_attention(*heads).out.transpose(1, 2).flatten(2).square()
    (right_grad,) = torch.autograd.grad(right.sum(), exact)
    assert_within_factor(out, right.float(), right, floor=1e-5)
    assert_within_factor(grad, right_grad.float(), right_grad, floor=1e-5)
