"""flash-attn-4's mask class, with interval bounds turned into bits instead of a call for each score.

The only place that reaches into the package's masks: its kernels make them by the name ``AttentionMask`` of their own
modules, which a subclass replaces.  The subclass acts on mask_mods of ours alone, and where the package does not look
as expected nothing is replaced: these mask_mods are also right when they are called score by score.  (The forward for
compute capability 10 needs none of this: it asks mask_mods for words of bits.)

Which scores a thread has: on Hopper, columns 0, 1, 8, 9, 16, 17, ... of a row, counted from its first one; in the
transposed products of backward kernels the columns are queries.  There a thread has two keys on Hopper, one on
Blackwell, whose queries come in runs, as row_to_r2p_idx of the package says.  See :mod:`magi_flex.kernels.fa4_masks`
for who then gets bounds by key.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from flash_attn.cute import flash_bwd_sm90, flash_bwd_sm100, flash_fwd_sm90
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
_TRANSPOSED_PARAMETERS = (
    *("self", "acc_S", "tScS_t2r", "t0ScS_t2r", "m_block", "n_block", "mask_seqlen", "mask_causal", "mask_local"),
    *("mask_mod", "batch_idx", "head_idx", "aux_data", "fastdiv_mods", "is_full_block", "check_m_boundary"),
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
                _mask_line(
                    acc_mn[None, c], aux_data.tensors, (batch_idx, head_idx), place, origin, slots, _element_of_pairs
                )
            return
        origin = first_key + own_mn[0][key]
        group = self.qhead_per_kvhead_packgqa
        for r in range(cute.size(acc_mn.shape[0])):
            place, head = first_row + own_mn[r, 0][row], head_idx
            if group != 1:
                place, head = place // group, head_idx * group + place % group
            _mask_line(acc_mn[r, None], aux_data.tensors, (batch_idx, head), place, origin, slots, _element_of_pairs)

    def apply_mask_sm100_transposed(self, acc_S: Any, *, t0ScS_t2r: Any, mask_mod: Any = None, **options: Any) -> None:
        options |= {"t0ScS_t2r": t0ScS_t2r, "mask_mod": mask_mod}
        if getattr(mask_mod, "interval_slots", None) is not None and mask_mod.by_key and _has_runs(t0ScS_t2r):
            self._apply_to_block(acc_S, **options)
        else:
            super().apply_mask_sm100_transposed(acc_S, **options)

    @cute.jit
    def _apply_to_block(
        self,
        acc_S: cute.Tensor,
        tScS_t2r: cute.Tensor,
        t0ScS_t2r: cute.Tensor,
        m_block: Int32,
        n_block: Int32,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool],
        mask_mod: cutlass.Constexpr[Any],
        batch_idx: Int32,
        head_idx: Int32,
        aux_data: Any,
        fastdiv_mods: Any,
        is_full_block: Boolean,
        check_m_boundary: Boolean,
    ) -> None:
        if is_full_block:  # of which only the rows past the last one are masked
            AttentionMask.apply_mask_sm100_transposed(
                self,
                acc_S,
                tScS_t2r,
                t0ScS_t2r,
                m_block,
                n_block,
                mask_seqlen,
                mask_causal,
                mask_local,
                mask_mod,
                batch_idx,
                head_idx,
                aux_data,
                fastdiv_mods,
                True,
                check_m_boundary,
            )
        else:
            key, origin = tScS_t2r[0][0] + n_block * self.tile_n, tScS_t2r[0][1] + m_block * self.tile_m
            run = cute.size(tScS_t2r, mode=[0])
            element = functools.partial(_element_of_runs, run)
            _mask_line(acc_S, aux_data.tensors, (batch_idx, head_idx), key, origin, mask_mod.interval_slots, element)


def _has_runs(places: Any) -> bool:
    """Whether the queries of the first thread, constants, are those that _element_of_runs takes them for."""
    run = cute.size(places, mode=[0])
    return [places[i][1] for i in range(cute.size(places))] == [
        i // run * 2 * run + i % run for i in range(cute.size(places))
    ]


def _mask_line(
    line: Any,
    tables: Any,
    group: tuple[Any, Any],
    place: Any,
    origin: Any,
    slots: int,
    element: Callable[[Any], Any],
) -> None:
    """Mask a line of a thread's accumulators, whose first one is at ``origin``, by the intervals at ``place``.

    ``element``: how many of the line's elements lie before a column that is counted from its first one.
    """
    if slots == ANY_NUMBER:
        starts, ends = (table[(*group, None, place)] for table in tables[:2])
        words = cute.make_rmem_tensor(-(-cute.size(line.shape) // package_mask.MASK_R2P_CHUNK_SIZE), Uint32)
        _union(words, starts, ends, origin, element)
        package_mask.mask_r2p_lambda(line, lambda chunk: words[chunk], rank1=True)
        return
    bounds = [[element(table[(*group, slot, place)] - origin) for table in tables[:2]] for slot in range(slots)]

    def bits(chunk: int) -> Any:
        return functools.reduce(operator.or_, (_word(begin, end, chunk) for begin, end in bounds))

    package_mask.mask_r2p_lambda(line, bits, rank1=True)


@cute.jit
def _union(
    words: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, origin: Int32, element: cutlass.Constexpr[Any]
) -> None:
    """Bits of all intervals, however many there are."""
    for chunk in cutlass.range_constexpr(cute.size(words.shape)):
        words[chunk] = Uint32(0)
    for slot in cutlass.range(cute.size(starts.shape), unroll=1):
        begin, end = element(starts[slot] - origin), element(ends[slot] - origin)
        for chunk in cutlass.range_constexpr(cute.size(words.shape)):
            words[chunk] = words[chunk] | _word(begin, end, chunk)


def _word(begin: Any, end: Any, chunk: int) -> Any:
    """Bits of the elements from ``begin`` up to ``end``, of 32 of them."""
    return package_mask.r2p_bitmask_above(begin, chunk) & package_mask.r2p_bitmask_below(end, chunk)


def _element_of_pairs(column: Any) -> Any:
    """Columns 0, 1, 8, 9, ..."""
    column = cutlass.max(column, Int32(0))
    return (column // 8) * 2 + cutlass.min(column % 8, Int32(2))


def _element_of_runs(run: int, column: Any) -> Any:
    """Columns in runs; the next run is another thread's."""
    return package_mask.row_to_r2p_idx(cutlass.max(column, Int32(0)), run, 2)


@functools.cache
def install_interval_mask() -> bool:
    """Put IntervalMask into the kernels' modules; False where the package does not look as expected."""
    parameters, transposed = (
        tuple(inspect.signature(method).parameters)
        for method in (AttentionMask.apply_mask, AttentionMask.apply_mask_sm100_transposed)
    )
    modules = (flash_fwd_sm90, flash_bwd_sm90, flash_bwd_sm100)
    helpers: tuple[Any, ...] = tuple(
        getattr(package_mask, name, None)
        for name in (
            *("r2p_bitmask_below", "r2p_bitmask_above", "mask_r2p_lambda", "MASK_R2P_CHUNK_SIZE"),
            "row_to_r2p_idx",
        )
    )
    expected = (
        parameters == _PARAMETERS
        and transposed == _TRANSPOSED_PARAMETERS
        and tuple(AttentionMask.__dataclass_fields__) == _FIELDS
        and None not in helpers
        and all(getattr(module, "AttentionMask", None) is AttentionMask for module in modules)
    )
    if not expected:
        logger.warning("flash-attn-4's mask class has changed: interval masks are applied score by score")
        return False
    for module in modules:
        module.AttentionMask = IntervalMask
    return True
