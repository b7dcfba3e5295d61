"""flash-attn-4's mask for Hopper, with interval bounds turned into bits instead of a call for each score.

The only place that reaches into the package: its Hopper kernels make their masks by the name ``AttentionMask`` of their
own modules, which a subclass replaces.  The subclass acts on mask_mods of ours alone, and where the package does not
look as expected nothing is replaced: these mask_mods are also right when they are called score by score.

The layout of accumulators is that of a warpgroup product: a thread has columns 0, 1, 8, 9, 16, 17, ... counted from its
first one.  In the transposed product of the backward these are queries, and each thread has two keys; see
:mod:`magi_flex.kernels.fa4_masks` for who then gets bounds by key.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90
from flash_attn.cute import mask as package_mask
from flash_attn.cute.mask import AttentionMask
from quack import layout_utils

logger = logging.getLogger("magi_flex")

# Slots of a mask_mod that looks at as many intervals as its tables have, in a loop.
ANY_NUMBER = 0

_PARAMETERS = (
    *("self", "acc_S", "batch_idx", "head_idx", "m_block", "n_block", "thr_mma", "mask_seqlen", "mask_causal"),
    *("mask_local", "mask_mod", "aux_data", "fastdiv_mods"),
)
_FIELDS = (
    *("tile_m", "tile_n", "seqlen_info", "window_size_left", "window_size_right", "qhead_per_kvhead_packgqa"),
    "swap_AB",
)


class IntervalMask(AttentionMask):
    """AttentionMask, and bits for mask_mods that have ``interval_slots`` (a number, or ANY_NUMBER)."""

    def apply_mask(self, acc_S: Any, *args: Any, mask_mod: Any = None, **options: Any) -> Any:
        slots = getattr(mask_mod, "interval_slots", None)
        if slots is not None and mask_mod.by_key == self.swap_AB:
            return self._apply_intervals(acc_S, *args, slots=slots, **options)
        return super().apply_mask(acc_S, *args, mask_mod=mask_mod, **options)

    def _apply_intervals(
        self,
        acc_S: Any,
        batch_idx: Any,
        head_idx: Any,
        m_block: Any,
        n_block: Any,
        thr_mma: Any,
        *,
        slots: int,
        aux_data: Any,
        **_: Any,
    ) -> None:
        """Bounds are within the lengths, and empty past the last row, so that no length has to be looked at."""
        acc_mn = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        tile = (self.tile_n, self.tile_m) if self.swap_AB else (self.tile_m, self.tile_n)
        places = cute.make_identity_tensor(tile)
        own_mn = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=self.swap_AB)
        row, key = (1, 0) if self.swap_AB else (0, 1)
        first_row, first_key = m_block * self.tile_m, n_block * self.tile_n
        if self.swap_AB:  # along a thread's line are queries
            origin = first_row + own_mn[0][row]
            for c in range(cute.size(acc_mn.shape[1])):
                place = first_key + own_mn[0, c][key]
                _mask_line(acc_mn[None, c], aux_data.tensors, (batch_idx, head_idx), place, origin, slots)
            return
        origin = first_key + own_mn[0][key]
        group = self.qhead_per_kvhead_packgqa
        for r in range(cute.size(acc_mn.shape[0])):
            place, head = first_row + own_mn[r, 0][row], head_idx
            if group != 1:
                place, head = place // group, head_idx * group + place % group
            _mask_line(acc_mn[r, None], aux_data.tensors, (batch_idx, head), place, origin, slots)


def _mask_line(line: Any, tables: Any, group: tuple[Any, Any], place: Any, origin: Any, slots: int) -> None:
    """Mask a line of a thread's accumulators, whose first one is at ``origin``, by the intervals at ``place``."""
    if slots == ANY_NUMBER:
        starts, ends = (table[(*group, None, place)] for table in tables[:2])
        words = cute.make_rmem_tensor(-(-cute.size(line.shape) // package_mask.MASK_R2P_CHUNK_SIZE), Uint32)
        _union(words, starts, ends, origin)
        package_mask.mask_r2p_lambda(line, lambda chunk: words[chunk], rank1=True)
        return
    bounds = [[_element(table[(*group, slot, place)] - origin) for table in tables[:2]] for slot in range(slots)]

    def bits(chunk: int) -> Any:
        return functools.reduce(operator.or_, (_word(begin, end, chunk) for begin, end in bounds))

    package_mask.mask_r2p_lambda(line, bits, rank1=True)


@cute.jit
def _union(words: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, origin: Int32) -> None:
    """Bits of all intervals, however many there are."""
    for chunk in cutlass.range_constexpr(cute.size(words.shape)):
        words[chunk] = Uint32(0)
    for slot in cutlass.range(cute.size(starts.shape), unroll=1):
        begin, end = _element(starts[slot] - origin), _element(ends[slot] - origin)
        for chunk in cutlass.range_constexpr(cute.size(words.shape)):
            words[chunk] = words[chunk] | _word(begin, end, chunk)


def _word(begin: Any, end: Any, chunk: int) -> Any:
    """Bits of the elements from ``begin`` up to ``end``, of 32 of them."""
    return package_mask.r2p_bitmask_above(begin, chunk) & package_mask.r2p_bitmask_below(end, chunk)


def _element(column: Any) -> Any:
    """How many of a thread's elements lie before a column that is counted from its first one."""
    column = cutlass.max(column, Int32(0))
    return (column // 8) * 2 + cutlass.min(column % 8, Int32(2))


@functools.cache
def install_interval_mask() -> bool:
    """Put IntervalMask into the Hopper kernels' modules; False where the package does not look as expected."""
    parameters = tuple(inspect.signature(AttentionMask.apply_mask).parameters)
    modules = (flash_fwd_sm90, flash_bwd_sm90)
    helpers: tuple[Any, ...] = tuple(
        getattr(package_mask, name, None)
        for name in ("r2p_bitmask_below", "r2p_bitmask_above", "mask_r2p_lambda", "MASK_R2P_CHUNK_SIZE")
    )
    expected = (
        parameters == _PARAMETERS
        and tuple(AttentionMask.__dataclass_fields__) == _FIELDS
        and None not in helpers
        and all(getattr(module, "AttentionMask", None) is AttentionMask for module in modules)
    )
    if not expected:
        logger.warning("flash-attn-4's mask class has changed: interval masks on Hopper are applied score by score")
        return False
    for module in modules:
        module.AttentionMask = IntervalMask
    return True
