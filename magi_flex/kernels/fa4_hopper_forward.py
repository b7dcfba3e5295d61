"""Hopper's forward kernels of flash-attn-4, adapted while they are traced.

Both changes are to classes that the kernels take by the names of their module, and act in the thread alone that asks
for them; where the package does not look as expected nothing changes.

*Last rows first.*  Where no causal flag is set, thread blocks take tiles of rows in ascending order.  With most masks
later rows see more keys: the longest tiles would come last, and multiprocessors wait for them at the end.  The order is
turned around here, as the package does it for causal flags.

*Logarithms to base 2.*  The kernels write the natural ones of sums; ours are to base 2, and a kernel that converts them
takes 3 to 4 % of the time of attention over 2K rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from flash_attn.cute import flash_fwd_sm90
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.tile_scheduler import SingleTileScheduler

logger = logging.getLogger("magi_flex")

LOG2_E = math.log2(math.e)


class _Wanted(threading.local):
    """What the kernels that this thread traces are to do."""

    last_rows_first = False
    base_2 = False


_wanted = _Wanted()


class OrderedScheduler(SingleTileScheduler):
    """Makes schedulers whose tiles of rows count from the end where that is wanted."""

    @staticmethod
    def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> SingleTileScheduler:
        if not _wanted.last_rows_first:
            return SingleTileScheduler.create(params, ctx, loc=loc, ip=ip)
        tile, head, batch = cute.arch.block_idx()
        return SingleTileScheduler(params, (params.num_block - 1 - tile, head, batch), loc=loc, ip=ip)


class Base2Softmax(Softmax):
    """Softmax whose sums end as logarithms to base 2 where that is wanted."""

    @staticmethod
    def create(*args: Any, **options: Any) -> Softmax:
        made = Softmax.create(*args, **options)
        return Base2Softmax(**vars(made)) if _wanted.base_2 else made

    def finalize(self, *args: Any, **options: Any) -> cute.Tensor:
        row_scale = super().finalize(*args, **options)
        self.row_sum.store(self.row_sum.load() * LOG2_E)  # -inf, of empty rows, stays
        return row_scale


@contextlib.contextmanager
def adapted(last_rows_first: bool) -> Iterator[None]:
    """Forward kernels that this thread traces meanwhile write logarithms to base 2 (where :func:`writes_base_2`).

    Args:
        last_rows_first: they also take the last rows first, if they do not go by a flag's order.
    """
    _wanted.last_rows_first, _wanted.base_2 = last_rows_first and _orders(), writes_base_2()
    try:
        yield
    finally:
        _wanted.last_rows_first = _wanted.base_2 = False


@functools.cache
def writes_base_2() -> bool:
    """Whether adapted kernels do, which is found out, and prepared, by the first call."""
    return _replace(
        Softmax,
        Base2Softmax,
        ("scale_log2", "num_rows", "row_max", "row_sum", "arch", "softmax_scale") == tuple(Softmax.__dataclass_fields__)
        and tuple(inspect.signature(Softmax.finalize).parameters) == ("self", "final_scale", "sink_val"),
        "logarithms are converted by another kernel",
    )


@functools.cache
def _orders() -> bool:
    return _replace(
        SingleTileScheduler,
        OrderedScheduler,
        tuple(inspect.signature(SingleTileScheduler.create).parameters) == ("params", "ctx", "loc", "ip")
        and "num_block" in SingleTileScheduler.Params.__dataclass_fields__,
        "on Hopper the first rows of a mask come first",
    )


def _replace(original: type, ours: type, as_expected: bool, otherwise: str) -> bool:
    name = original.__name__
    # (Ours: two threads may ask at once, and must get the same answer.)
    if not as_expected or getattr(flash_fwd_sm90, name, None) not in (original, ours):
        logger.warning("flash-attn-4's class %s has changed: %s", name, otherwise)
        return False
    setattr(flash_fwd_sm90, name, ours)
    return True
