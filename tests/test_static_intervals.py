"""Intervals that are computed without reading anything back from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_lowering.capture import trace_mask_mod
from inductor_lowering.static_intervals import NotStatic, static_intervals
from magi_flex import mods
from magi_flex.fx_program import FxProgram
from magi_flex.op_specs import MaskSpec, split_captures
from tests.cases.masks import MaskCase

WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave.Tensor")


class NothingIsReadBack(TorchDispatchMode):
    """Fails at operations for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(wait in name for wait in WAITS), f"{name} reads from the device"
        if "index.Tensor" in name:
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]), "index by a mask"
        return func(*args, **(kwargs or {}))


def number(*shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def spec_of(program: FxProgram, captures: Sequence[Any]) -> MaskSpec:
    return MaskSpec(program.to_json(), split_captures(captures)[0])


B, H, Q, K = 2, 3, 37, 41
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "causal": (mods.causal(), 1),
    "window": (mods.sliding_window(7), 1),
    "sink and window": (mods.sink_window(3, 7), 2),
    "chunks": (mods.chunked_local(8), 1),
    "prefix": (mods.prefix_lm(number(B, low=0, high=K)), 2),
    "mirrored": (lambda b, h, q, k: (Q - 1 - k >= q) | (k == q), 2),
    "strided keys": (lambda b, h, q, k: (k * 3 > q) & ~(k // 4 == q // 4), 2),
    "keys alone": (lambda b, h, q, k: (k % 16 < 5) & (k <= q), 3),
}


def captured() -> dict[str, tuple[Callable[..., Any], int]]:
    first, last = number(Q, low=-5, high=K + 5), number(B, Q, low=-5, high=K + 9, dtype=torch.int32)
    window, huge = number(H, low=0, high=20), torch.tensor([2**63 - 1, -(2**63), 5])
    rows = number(B, Q, low=0, high=2).bool()
    return {
        "key range": (lambda b, h, q, k: (k >= first[q]) & (k < last[b, q]), 1),
        "window a head": (lambda b, h, q, k: (q - k < window[h]) & (q >= k), 1),
        "numbers beyond the lengths": (lambda b, h, q, k: (q - k <= huge[h]) & (k != huge[h]), 2),
        "rows": (lambda b, h, q, k: rows[b, q] & ((k <= q) | (k > q + window[h].to(torch.int32))), 2),
        "either": (lambda b, h, q, k: torch.where(rows[b, q], k <= q, k >= last[b, q]), 3),
        "shifted": (lambda b, h, q, k: k - last[b, q] <= q, 1),
    }


CASES |= captured()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_mask(name: str) -> None:
    mask_mod, slots = CASES[name]
    wanted = MaskCase(name, mask_mod, B, H, Q, K, None).dense()
    program, captures = trace_mask_mod(mask_mod)
    shape = spec_of(program, captures).static_shape(*split_captures(captures)[1:], B, H, Q, K)
    static_intervals(program, captures, B, H, Q, K, "cpu")  # what follows from indices is known from now on
    with NothingIsReadBack():
        intervals = static_intervals(program, captures, B, H, Q, K, "cpu")
    assert torch.equal(intervals.to_dense().expand(B, H, Q, K), wanted.expand(B, H, Q, K))
    assert intervals.max_intervals <= slots and intervals.starts.shape == shape


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (5, 1), (1, 5), (0, 3), (3, 0)])
def test_few_rows_or_keys(q_len: int, kv_len: int) -> None:
    for mask_mod in (mods.causal(), mods.sink_window(1, 2), mods.chunked_local(2)):
        program, captures = trace_mask_mod(mask_mod)
        intervals = static_intervals(program, captures, 1, 1, q_len, kv_len, "cpu")
        if q_len and kv_len:
            wanted = MaskCase("small", mask_mod, 1, 1, q_len, kv_len, None).dense()
            assert torch.equal(intervals.to_dense(), wanted)


DOCUMENTS = torch.arange(K) // 7
DEPENDS_ON_DATA = {
    "captured values of the keys": mods.document_causal(DOCUMENTS),
    "rises and falls": lambda b, h, q, k: k % 7 <= q,
    "too large for exact": lambda b, h, q, k: k - DOCUMENTS[q] <= q,
    "abs of the query and the key": lambda b, h, q, k: (q - k).abs() < 5,
    "up to 21 intervals": lambda b, h, q, k: (k % 2 == 0) & (k <= q),
}


@pytest.mark.parametrize("reason", DEPENDS_ON_DATA)
def test_says_what_it_depends_on(reason: str) -> None:
    program, captures = trace_mask_mod(DEPENDS_ON_DATA[reason])
    assert reason in str(spec_of(program, captures).static_shape(*split_captures(captures)[1:], 1, 1, K, K))
    with pytest.raises(NotStatic, match=reason):
        static_intervals(program, captures, 1, 1, K, K, "cpu")
