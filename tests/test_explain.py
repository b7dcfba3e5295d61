"""explain: its figures are the mask's, its route is routing's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import magi_flex
from magi_flex import explain_mask, mods, tile_map
from magi_flex.kernels import device_plans
from magi_flex.kernels.route import route
from tests.cases.masks import MASKS, make_mask


def classes(dense_BHQK: torch.Tensor, tile: int) -> tuple[int, int, int]:
    """(full, partial, empty) tiles, from the dense mask."""
    q_len, kv_len = dense_BHQK.shape[2:]
    inside = torch.ones(1, 1, q_len, kv_len, dtype=torch.long)
    attended, size = (
        torch.nn.functional.pad(x.long(), (0, -kv_len % tile, 0, -q_len % tile))
        .unflatten(2, (-1, tile))
        .unflatten(4, (-1, tile))
        .sum((3, 5))
        for x in (dense_BHQK, inside)
    )
    full = int((attended == size).sum())
    empty = int((attended == 0).sum())
    return full, attended.numel() - full - empty, empty


@pytest.mark.parametrize("name", ["causal", "document_causal", "sliding_window", "key_padding", "dense_table"])
@pytest.mark.parametrize("length", [1, 257])
def test_figures_equal_the_dense_mask(name: str, length: int) -> None:
    case = make_mask(name, q_len=length)
    explanation = magi_flex.explain(
        case.mask_mod, case.q_len, case.kv_len, B=case.batch, H=case.heads, name=name, q_tile=32, kv_tile=32
    )
    dense = case.dense()
    assert torch.equal(explanation.plan.to_dense().expand_as(dense), dense)
    shared = dense[: explanation.plan.starts.shape[0], : explanation.plan.starts.shape[1]]
    counts = explanation.counts
    exact = classes(shared, 32)
    if explanation.plan.bit_tiles is None:
        assert (counts.full, counts.partial, counts.empty) == exact
    else:
        assert counts.full + counts.partial + counts.empty == sum(exact) and counts.partial >= exact[1]
    text = str(explanation)
    assert text.startswith(f"{name}: {length:,} queries x {length:,} keys")
    assert f"area       {int(shared.sum()):,} pairs" in text
    assert f"{counts.full:,} full, {counts.partial:,} partial, {counts.empty:,} empty" in text


@pytest.mark.parametrize(
    ("missing", "builder"), [(None, "tiles by our GPU kernels"), ("no Triton", "tiles by torch: no Triton")]
)
def test_planning_on_a_gpu(monkeypatch: pytest.MonkeyPatch, missing: str | None, builder: str) -> None:
    """Whether the GPU is waited for, and who makes tiles, is said where the call would run on one."""
    monkeypatch.setattr(device_plans, "missing", lambda: missing)
    ids = torch.arange(40) // 9
    said = {}
    masks = {
        "document_causal": mods.document_causal(ids),
        "sliding_window": mods.sliding_window(7),
        "chosen keys": lambda b, h, q, k: (ids[k] > 1) & (k <= q),
    }
    for name, mask_mod in masks.items():
        explanation = magi_flex.explain(mask_mod, 40, 40)
        assert "planning" not in str(explanation)
        on_gpu = replace(explanation.facts, device=torch.device("cuda"))
        said[name] = "\n".join(replace(explanation, facts=on_gpu)._device_lines())
    assert "waits for the GPU once a mask: the number of intervals depends on captured values" in said["chosen keys"]
    assert "a mask by labels: CUDA graphs can hold the plan" in said["document_causal"]
    assert "nothing is read back" in said["sliding_window"]
    assert all(builder in text for text in said.values())


def test_names_of_the_shared_cases_used_above_exist() -> None:
    assert {"causal", "document_causal", "sliding_window", "key_padding", "dense_table"} <= set(MASKS)


@pytest.mark.parametrize(("batch", "heads", "q_len", "kv_len"), [(1, 1, 1, 1), (2, 3, 300, 700)])
def test_bytes_of_a_stock_block_mask(batch: int, heads: int, q_len: int, kv_len: int) -> None:
    stock = create_block_mask(lambda b, h, q, k: q >= k - b - h, batch, heads, q_len, kv_len, device="cpu")
    assert isinstance(stock, BlockMask)
    tensors = [x for x in stock.as_tuple(flatten=True) if isinstance(x, torch.Tensor)]
    assert explain_mask.stock_block_mask_nbytes(batch, heads, q_len, kv_len) == sum(x.nbytes for x in tensors)


def test_a_block_mask_is_explained_whoever_made_it() -> None:
    def window(b, h, q, k):
        return (q >= k) & (q - k < 40)

    stock = create_block_mask(window, None, None, 200, 200, device="cpu")
    ours = magi_flex.create_block_mask(window, None, None, 200, 200, device="cpu")
    explanations = [magi_flex.explain(x) for x in (stock, ours)]
    explanations.append(magi_flex.explain(explanations[0].plan))
    assert len({x.plan.area() for x in explanations}) == 1
    assert all(x.counts == explanations[0].counts for x in explanations)


def test_the_route_is_the_one_taken() -> None:
    explanation = magi_flex.explain(lambda b, h, q, k: q >= k, 64, 64, dtype=torch.float64, device="cpu")
    assert explanation.backend == route(explanation.facts).name
    refused = {name: reasons for name, reasons in explanation.routes if reasons}
    text = str(explanation)
    assert f"{explanation.backend}  " in text and "taken" in text
    for reasons in refused.values():
        assert all(reason in text for reason in reasons)


def test_a_streamed_mask_says_why() -> None:
    explanation = magi_flex.explain(lambda b, h, q, k: torch.sin(q * 1.3 + k * k) > 0, 64, 64, device="cpu")
    assert explanation.report.path == "stream" and explanation.report.reasons
    assert all(reason in str(explanation) for reason in explanation.report.reasons)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"q_len": None}, "q_len, kv_len"),
        ({"q_tile": 0}, "q_tile"),
        ({"heads": (8, 3)}, "heads"),
    ],
)
def test_bad_input(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        magi_flex.explain(lambda b, h, q, k: q >= k, **{"q_len": 8, "kv_len": 8, **keywords})


def test_plot_hands_over_the_class_counts(monkeypatch) -> None:
    seen: dict = {}
    monkeypatch.setattr(tile_map, "draw", lambda plan, target, **given: seen.update(given, target=target) or target)
    explanation = magi_flex.explain(lambda b, h, q, k: q >= k + h, 300, 300, H=2, device="cpu", name="late")
    assert explanation.plot("x.png", head=1) == "x.png"
    counts = explanation.counts
    assert seen["counts"] == {"full": counts.full, "partial": counts.partial, "empty": counts.empty}
    assert "late" in seen["title"] and "head 1" in seen["title"] and seen["head"] == 1
    with pytest.raises(ValueError, match="head: 2 given, but the mask has 2"):
        explanation.plot("x.png", head=2)


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    explanation = magi_flex.explain(lambda b, h, q, k: q >= k, 300, 300, device="cpu")
    path = explanation.plot(tmp_path / "causal.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_mask() -> None:
    with pytest.raises(TypeError, match="mask: is str; a mask_mod, a BlockMask or a MaskPlan is needed"):
        magi_flex.explain("causal")  # type: ignore[arg-type]
