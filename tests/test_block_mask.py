"""BlockMasks in and out: ours agree with torch's, and stock ones of any origin become exact plans.

Shape legend: B batch, H heads, Q query rows, K keys, R intervals of a row, N query blocks, M key blocks.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as stock
from torch.nn.attention.flex_attention import BlockMask, create_mask

import magi_flex
from inductor_lowering import to_intervals
from inductor_lowering.canonical import find_canonical
from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.to_intervals import plan_from_block_mask, plan_from_lists, plan_with_report
from magi_flex import mods
from magi_flex.attn_slices import plan_from_attn_slices
from magi_flex.block_mask import CanonicalMaskMod, create_block_mask, from_attn_slices, plan
from tests.cases.masks import make_mask

NAMES = [
    "full",
    "nothing",
    "causal",
    "document_causal",
    "key_padding",
    "sink_and_window",
    "tree",
    "dense_table",
    "bigbird",
    "selected_blocks",
    "per_batch_and_head_mix",
]


LISTS = ("num_blocks", "indices")


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def expanded_lists(mask: BlockMask, batch: int, heads: int) -> tuple[Tensor, Tensor]:
    """Number of full blocks of each query block, and which blocks are listed at all."""
    assert mask.full_kv_num_blocks is not None
    return mask.full_kv_num_blocks.expand(batch, heads, -1), mask.to_dense().expand(batch, heads, -1, -1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [128, 64, (32, 128), (256, 48)])
def test_lists_equal_stock_ones(name: str, block_size: int | tuple[int, int]) -> None:
    for q_len, kv_len in ((129, 129), (5, 257), (513, 300)):
        case = make_mask(name, q_len, kv_len)
        sizes = (case.batch, case.heads, q_len, kv_len)
        ours = create_block_mask(case.mask_mod, *sizes, "cpu", block_size)
        theirs = stock.create_block_mask(case.mask_mod, *sizes, "cpu", block_size)
        for got, want in zip(
            expanded_lists(ours, case.batch, case.heads), expanded_lists(theirs, case.batch, case.heads), strict=True
        ):
            assert torch.equal(got, want)
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.seq_lengths == theirs.seq_lengths
        again = BlockMask.from_kv_blocks(*(getattr(ours, f"{kind}kv_{x}") for kind in ("", "full_") for x in LISTS))
        for field in (f"{kind}q_{x}" for kind in ("", "full_") for x in LISTS):
            got, want = getattr(ours, field), getattr(again, field)
            assert torch.equal(got, want) and got.dtype == want.dtype and got.stride() == want.stride()


@pytest.mark.parametrize("name", NAMES)
def test_canonical_mask_mod_and_plans_are_exact(name: str) -> None:
    for q_len, kv_len in ((1, 1), (127, 257), (300, 129)):
        case = make_mask(name, q_len, kv_len)
        dense = case.dense()
        sizes = (case.batch, case.heads, q_len, kv_len)
        ours = create_block_mask(case.mask_mod, *sizes, "cpu")
        assert torch.equal(create_mask(ours.mask_mod, *sizes, "cpu"), dense)
        theirs = stock.create_block_mask(case.mask_mod, *sizes, "cpu")
        for mask in (ours, theirs, case.mask_mod):
            found = plan(mask, q_len, kv_len, case.batch, case.heads, device="cpu")
            assert torch.equal(found.to_dense().expand(dense.shape), dense)


def test_listing_full_blocks_apart_is_optional() -> None:
    mask = create_block_mask(causal, None, None, 512, 512, "cpu", separate_full_blocks=False)
    assert mask.full_kv_num_blocks is None and mask.kv_num_blocks.tolist() == [[[1, 2, 3, 4]]]
    assert torch.equal(plan(mask).to_dense(), create_mask(causal, 1, 1, 512, 512, "cpu"))


# ---- memory and shapes ----------------------------------------------------------------------------------------------


def test_memory_grows_with_tokens() -> None:
    """A causal mask at 96000 x 96000 is about a megabyte."""
    mask = create_block_mask(causal, 4, 8, 96000, 96000, "cpu")
    assert mask.kv_num_blocks.shape[:2] == (1, 1)
    lists = sum(x.nbytes for x in mask.as_tuple() if isinstance(x, Tensor))
    found = plan(mask, B=4, H=8)
    assert found.starts.data_ptr() == mask.mask_mod.starts.data_ptr()
    assert lists < 1 << 20 and found.nbytes == 8 * 96000
    assert found.area() == 96000 * 96001 // 2


def test_new_documents_cost_far_less_than_attention() -> None:
    """32 documents, 0.8 M tokens in all, new lengths every step: a hundredth of one head's attention at most."""
    size, count = 800_000, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 1024, 64)
    begin = time.process_time()
    for _ in range(8):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    seconds_a_pair = (time.process_time() - begin) / (8 * 1024 * 1024)
    for _ in range(2):
        cuts = torch.randperm(size - 1, generator=generator)[: count - 1].sort().values + 1
        lengths = torch.cat((cuts, torch.tensor([size]))).diff(prepend=torch.zeros(1, dtype=torch.int64))
        begin = time.process_time()
        documents, _ = mods.documents_from_lengths(lengths.tolist())
        found = plan(mods.document_causal(documents), size, size)
        seconds = time.process_time() - begin
        assert found.area() == int((lengths * (lengths + 1) // 2).sum()) and found.nbytes == 8 * size
        assert seconds < 0.01 * seconds_a_pair * found.area()


def test_given_block_size_is_kept() -> None:
    assert create_block_mask(causal, None, None, 40000, 40000, "cpu").BLOCK_SIZE == (512, 512)
    assert create_block_mask(causal, None, None, 40000, 40000, "cpu", BLOCK_SIZE=256).BLOCK_SIZE == (256, 256)
    assert create_block_mask(causal, None, None, 4096, 4096, "cpu", (128, 256)).BLOCK_SIZE == (128, 256)


def document_mask(lengths: list[int], islands: int = 0) -> BlockMask:
    """Document-causal; ``islands`` keys that everybody sees add intervals to the rows."""
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (torch.arange(sum(lengths)) % 50 == 0) & (torch.arange(sum(lengths)) < 50 * islands)
    mask_mod = lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k) | seen[k]  # noqa: E731
    return create_block_mask(mask_mod, None, None, sum(lengths), sum(lengths), "cpu")


def test_new_contents_do_not_compile_again() -> None:
    """Same graph for new documents, and for other interval counts that pad to the same power of two."""
    counter = CompileCounterWithBackend("eager")
    attention = torch.compile(stock.flex_attention, backend=counter, fullgraph=True)
    q = torch.randn(1, 1, 256, 16)
    for lengths, islands in (([100, 156], 2), ([3, 250, 3], 2), ([256], 3), ([60, 60, 60, 76], 3)):
        mask = document_mask(lengths, islands)
        assert isinstance(mask.mask_mod, CanonicalMaskMod) and mask.mask_mod.starts.shape[2] in (2, 4)
        if mask.mask_mod.starts.shape[2] == 4:
            out = attention(q, q, q, block_mask=mask)
            dense = create_mask(mask.mask_mod, 1, 1, 256, 256, "cpu")
            want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=dense)
            torch.testing.assert_close(out, want)
    assert counter.frame_count == 1


# ---- the canonical mask_mod as a program ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "document_causal", "per_batch_and_head_mix", "tree", "dense_table"])
def test_canonical_mask_is_recognised_and_costs_nothing(name: str) -> None:
    case = make_mask(name, 300)
    mask = create_block_mask(case.mask_mod, case.batch, case.heads, 300, 300, "cpu")
    program, captures = trace_mask_mod(mask.mask_mod)
    roles = find_canonical(program, captures)
    assert roles is not None and captures[roles.starts].data_ptr() == mask.mask_mod.starts.data_ptr()
    found, report = plan_with_report(program, captures, case.batch, case.heads, 300, 300)
    assert report.rules == ["canonical"] and found.starts.data_ptr() == mask.mask_mod.starts.data_ptr()
    assert torch.equal(found.to_dense(), case.dense())
    assert plan(mask, B=case.batch, H=case.heads).starts.data_ptr() == mask.mask_mod.starts.data_ptr()
    assert find_canonical(*trace_mask_mod(case.mask_mod)) is None


@pytest.mark.parametrize("name", ["causal", "dense_table"])
def test_canonical_mask_of_an_uncompiled_call_is_its_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of an uncompiled call holds the mask_mod's constants as literals, detached copies of a tensor."""
    case = make_mask(name, 300)
    mask = create_block_mask(case.mask_mod, 1, 1, 300, 300, "cpu")
    q = torch.randn(1, 1, 300, 16)
    found = []
    spied = to_intervals.find_canonical
    monkeypatch.setattr(to_intervals, "find_canonical", lambda *args: found.append(spied(*args)) or found[-1])
    with magi_flex.enable():
        out = stock.flex_attention(q, q, q, block_mask=mask)
    assert len(found) == 1 and found[0] is not None
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=case.dense())
    torch.testing.assert_close(out, want)


def test_what_only_looks_like_a_canonical_mask_is_not() -> None:
    starts = torch.zeros(1, 1, 1, 40, dtype=torch.int32)
    ends = torch.arange(40, dtype=torch.int32).view(1, 1, 1, 40)
    for mask_mod in (
        lambda b, h, q, k: (k >= starts[0, 0, 0, q]) | (k < ends[0, 0, 0, q]),
        lambda b, h, q, k: (k > starts[0, 0, 0, q]) & (k < ends[0, 0, 0, q]),
        lambda b, h, q, k: (k >= starts[0, 0, 0, q]) & (k < ends[0, 0, 0, k]),
        lambda b, h, q, k: (k >= starts[0, 0, 0, q]) & (k < starts[0, 0, 0, q]),
    ):
        assert find_canonical(*trace_mask_mod(mask_mod)) is None
    swapped = CanonicalMaskMod(ends, starts, 40)
    assert find_canonical(*trace_mask_mod(swapped)) is not None
    assert plan(swapped, 40, 40, device="cpu").area() == 0


@pytest.mark.parametrize("name", ["causal", "dense_table"])
def test_canonical_mask_with_shorter_lengths(name: str) -> None:
    case = make_mask(name, 300)
    mask_mod = create_block_mask(case.mask_mod, 1, 1, 300, 300, "cpu").mask_mod
    for q_len, kv_len in ((300, 200), (200, 300), (150, 140), (300, 290)):
        assert torch.equal(plan(mask_mod, q_len, kv_len, device="cpu").to_dense(), case.dense()[:, :, :q_len, :kv_len])
    with pytest.raises(ValueError, match="has 300 rows, but q_len is 301"):
        plan(mask_mod, 301, 300, device="cpu")


# ---- stock masks of any origin ---------------------------------------------------------------------------------------


def test_decoding_from_a_sliced_mask() -> None:
    """The rows of one query block with an offset, q_len 1: equal to the dense row."""
    base = stock.create_block_mask(causal, 4, None, 512, 512, "cpu")
    position = 300
    block = position // 128
    for make in (lambda m: m, lambda m: m.to("cpu")):
        one = make(base[:, :, block : block + 1])
        one.mask_mod = lambda b, h, q, k: causal(b, h, q + position, k)
        one.seq_lengths = (1, 512)
        found = plan_from_block_mask(one, batch=4, heads=2)
        assert found.starts.shape[3] == 1
        assert torch.equal(found.to_dense()[0, 0, 0], torch.arange(512) <= position)


def test_a_sliced_mask_without_its_mask_mod_is_an_error() -> None:
    base = stock.create_block_mask(causal, 1, 1, 512, 512, "cpu")
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        plan(base[:, :, 0:2])


def test_lists_alone_decide_where_the_mask_mod_is_trivial() -> None:
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 3, (2, 3, 5, 7), generator=generator)  # nothing, partial, full
    lists = []
    for wanted in (1, 2):
        dense = kind == wanted
        order = dense.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
        lists += [dense.sum(-1).int(), order]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(64, 32))
    want = (kind > 0).repeat_interleave(64, 2).repeat_interleave(32, 3)
    assert torch.equal(plan(mask).to_dense(), want)
    only_full = BlockMask.from_kv_blocks(
        torch.zeros_like(lists[0]), lists[1], lists[2], lists[3], BLOCK_SIZE=(64, 32), mask_mod=causal
    )
    assert torch.equal(plan(only_full).to_dense(), (kind == 2).repeat_interleave(64, 2).repeat_interleave(32, 3))


def test_lists_and_mask_mod_both_count() -> None:
    """Partial blocks: lists AND mask_mod; full blocks: the lists alone; lengths that no block divides."""
    generator = torch.Generator().manual_seed(1)
    kind = torch.randint(0, 3, (1, 1, 4, 3), generator=generator)
    order = [(kind == n).to(torch.int8).argsort(dim=-1, descending=True, stable=True).int() for n in (1, 2)]
    count = [(kind == n).sum(-1).int() for n in (1, 2)]
    table = torch.rand(200, 290, generator=generator) < 0.5
    inside = create_mask(causal, 1, 1, 200, 290, "cpu")
    for mask_mod, holds in ((causal, inside), (lambda b, h, q, k: table[q, k], table[None, None])):
        mask = BlockMask.from_kv_blocks(
            count[0], order[0], count[1], order[1], BLOCK_SIZE=(64, 100), mask_mod=mask_mod, seq_lengths=(200, 290)
        )
        pairs = kind.repeat_interleave(64, 2).repeat_interleave(100, 3)[:, :, :200, :290]
        want = (pairs == 2) | ((pairs == 1) & holds)
        assert torch.equal(plan(mask).to_dense(), want)
        mask_plan = plan(mask_mod, 200, 290, device="cpu")
        lists = (count[0], order[0], count[1], order[1], (64, 100), 200, 290)
        assert torch.equal(plan_from_lists(*lists, mask_plan).to_dense(), want)
        assert torch.equal(plan_from_lists(*lists).to_dense(), pairs > 0)


def test_lists_of_our_own_are_looked_at_only_where_they_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in calls with a mask as it was made; but after a write without a trace, or with another mask_mod."""
    looks: list[int] = []
    look = to_intervals.lists_agree
    monkeypatch.setattr(to_intervals, "lists_agree", lambda *args: looks.append(1) or look(*args))
    mask = magi_flex.create_block_mask(mods.document_causal(torch.arange(96) // 50), None, None, 96, 96, "cpu", 16)
    mod = mask.mask_mod
    dense = magi_flex.plan(mask).to_dense()
    partial, full = (expanded.view(6, 6).repeat_interleave(16, 0).repeat_interleave(16, 1) for expanded in listed(mask))
    swapped = CanonicalMaskMod(mod.ends, mod.starts, 96)

    def inverted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~mod(b, h, q, k)

    lists = (mask.kv_num_blocks, mask.kv_indices, *full_lists(mask), (16, 16))
    other_mods = [BlockMask.from_kv_blocks(*lists, other, (96, 96)) for other in (inverted, swapped)]
    looks.clear()
    with magi_flex.enable():
        for given, wanted in ((mask, dense), (other_mods[0], (partial & ~dense) | full), (other_mods[1], full)):
            assert torch.equal(attended(given), wanted.view(96, 96)), looks
        assert len(looks) == 1  # the swapped intervals
        mask.kv_num_blocks.data.zero_()
        assert torch.equal(attended(mask), full) and len(looks) == 2


def attended(mask: BlockMask) -> Tensor:
    """Which pairs of 96 x 96 a call of flex_attention attends to."""
    zeros = torch.zeros(1, 1, 96, 16)
    values = torch.eye(96).view(1, 1, 96, 96)
    return stock.flex_attention(zeros, zeros, values, block_mask=mask)[0, 0] > 0


def listed(mask: BlockMask) -> list[Tensor]:
    """Which blocks are listed as partial, and as full."""
    found = []
    for count, order in ((mask.kv_num_blocks, mask.kv_indices), full_lists(mask)):
        entry = torch.arange(order.shape[-1]) < count[..., None]
        found.append(torch.zeros(order.shape, dtype=torch.bool).scatter_(3, order.long(), entry))
    return found


def test_lists_that_contradict_a_canonical_mask_mod() -> None:
    """Fewer blocks than the mask_mod has, or a full block where it is not full: the lists win, as in stock kernels."""
    ours = create_block_mask(causal, None, None, 384, 384, "cpu")
    want = create_mask(causal, 1, 1, 384, 384, "cpu")
    fewer = BlockMask.from_kv_blocks(
        ours.kv_num_blocks * 0, ours.kv_indices, *full_lists(ours), mask_mod=ours.mask_mod, seq_lengths=(384, 384)
    )
    inside = torch.arange(384)[:, None] // 128 > torch.arange(384) // 128
    assert torch.equal(plan(fewer).to_dense()[0, 0], inside)
    fuller = BlockMask.from_kv_blocks(
        *full_lists(ours), ours.kv_num_blocks, ours.kv_indices, mask_mod=ours.mask_mod, seq_lengths=(384, 384)
    )
    diagonal = torch.arange(384)[:, None] // 128 == torch.arange(384) // 128
    assert torch.equal(plan(fuller).to_dense(), want | diagonal)


def full_lists(mask: BlockMask) -> tuple[Tensor, Tensor]:
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    return mask.full_kv_num_blocks, mask.full_kv_indices


def test_shared_lists_still_ask_the_mask_mod_about_every_batch_entry() -> None:
    mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, 1), 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: k <= q + 10 * b,
        seq_lengths=(100, 100),
    )
    q, k = torch.arange(100)[:, None], torch.arange(100)
    want = torch.stack([k <= q + 10 * b for b in range(3)])[:, None]
    assert torch.equal(plan_from_block_mask(mask, batch=3, heads=2).to_dense(), want)


@pytest.mark.parametrize("lengths", [(2048, 2048), (100, 2048), (2048, 130), (2, 2)])
def test_a_mask_adjusted_to_shorter_lengths(lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    adjusted = stock.create_block_mask(causal, None, None, 4096, 4096, "cpu", BLOCK_SIZE=256)._adjust(q_len, kv_len)
    ours = create_block_mask(causal, None, None, 4096, 4096, "cpu", BLOCK_SIZE=256)._adjust(q_len, kv_len)
    want = torch.arange(kv_len) <= torch.arange(q_len)[:, None]
    lists = adjusted.to_dense().repeat_interleave(256, 2).repeat_interleave(256, 3)[0, 0, :q_len, :kv_len].bool()
    assert torch.equal(plan(adjusted, q_len=q_len, kv_len=kv_len).to_dense()[0, 0], want & lists)
    assert torch.equal(plan(ours, q_len=q_len, kv_len=kv_len).to_dense()[0, 0], want & lists)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit() -> None:
    mask = stock.create_block_mask(lambda b, h, q, k: k <= q + b, 4, 8, 256, 256, "cpu")
    with pytest.raises(ValueError, match="made for batch 4, but batch is 2"):
        plan(mask, B=2)
    with pytest.raises(ValueError, match="made for heads 8, but heads is 3"):
        plan(mask, H=3)
    with pytest.raises(ValueError, match="has 2 query blocks of 128 rows, but q_len is 300"):
        plan(mask, q_len=300)
    with pytest.raises(ValueError, match="a mask_mod has no lengths of its own"):
        plan(causal, q_len=5)
    with pytest.raises(ValueError, match="one was given without the other"):
        plan_from_lists(mask.kv_num_blocks, mask.kv_indices, mask.kv_num_blocks, None, (128, 128), 256, 256)
    with pytest.raises(ValueError, match="kv_num_blocks: is"):
        plan_from_lists(mask.kv_num_blocks[0], mask.kv_indices, None, None, (128, 128), 256, 256)
    with pytest.raises(ValueError, match="B: is 0"):
        create_block_mask(causal, 0, None, 5, 5, "cpu")
    with pytest.raises(ValueError, match="Q_LEN: is -1"):
        create_block_mask(causal, None, None, -1, 5, "cpu")
    with pytest.raises(NotImplementedError, match="compute_dq_write_order: is True"):
        create_block_mask(causal, None, None, 5, 5, "cpu", compute_dq_write_order=True)
    with pytest.raises(ValueError, match="BLOCK_SIZE: is 0"):
        create_block_mask(causal, None, None, 5, 5, "cpu", 0)


# ---- AttnSlices and compiled regions ---------------------------------------------------------------------------------


def test_slice_lists() -> None:
    case = json.loads((Path(__file__).parent / "data" / "attn_slices.json").read_text())["cases"][2]
    q_ranges, k_ranges = [x[:2] for x in case["slices"]], [x[2:] for x in case["slices"]]
    args = (q_ranges, k_ranges, [int(digit) for digit in case["types"]], case["q_len"], case["kv_len"])
    mask = from_attn_slices(*args, device="cpu")
    assert isinstance(mask.mask_mod, CanonicalMaskMod)
    assert torch.equal(plan(mask).to_dense(), plan_from_attn_slices(*args).to_dense())


def test_inside_a_compiled_region_torch_makes_the_mask() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, 128, 128, "cpu")
        return stock.flex_attention(q, q, q, block_mask=mask)

    q = torch.randn(1, 1, 128, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(attend(q), want)


def test_default_device_is_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for CUDA knows an accelerator on a machine without a GPU, too."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert create_block_mask(causal, 1, 1, 8, 8).kv_num_blocks.device.type == "cpu"
    assert plan(causal, 8, 8).starts.device.type == "cpu"
