"""Hopper's forward kernels of flash-attn-4, made to begin with the last rows of a mask.

Where no causal flag is set, their thread blocks take tiles of rows in ascending order.  With most masks later rows see
more keys: the longest tiles would come last, and multiprocessors wait for them at the end.  The order is turned around
here, as the package does it for causal flags; what is computed does not change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from flash_attn.cute import flash_fwd_sm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler

logger = logging.getLogger("magi_flex")


class LastRowsFirst(SingleTileScheduler):
    """Makes schedulers whose tiles of rows count from the end."""

    @staticmethod
    def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> SingleTileScheduler:
        tile, head, batch = cute.arch.block_idx()
        return SingleTileScheduler(params, (params.num_block - 1 - tile, head, batch), loc=loc, ip=ip)


@contextlib.contextmanager
def last_rows_first() -> Iterator[None]:
    """Forward kernels that are traced meanwhile take the last rows first; one thread at a time may be inside.

    Changes nothing where the package does not look as expected.
    """
    if not _is_as_expected():
        yield
        return
    flash_fwd_sm90.SingleTileScheduler = LastRowsFirst
    try:
        yield
    finally:
        flash_fwd_sm90.SingleTileScheduler = SingleTileScheduler


@functools.cache
def _is_as_expected() -> bool:
    expected = (
        getattr(flash_fwd_sm90, "SingleTileScheduler", None) is SingleTileScheduler
        and tuple(inspect.signature(SingleTileScheduler.create).parameters) == ("params", "ctx", "loc", "ip")
        and "num_block" in SingleTileScheduler.Params.__dataclass_fields__
    )
    if not expected:
        logger.warning("flash-attn-4's scheduler has changed: on Hopper it takes the first rows of a mask first")
    return expected
