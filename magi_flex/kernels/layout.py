"""Memory layout of kernel outputs: FlexAttention's rule that a result follows the stride order of its input."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def fill_order(tensor: Tensor) -> list[int]:
    """Dimensions from the fastest to the slowest; the last one is always the fastest, as kernels load it whole.

    Equal strides: the later dimension counts as the faster one.  The rule of FlexAttention's own fake implementation.
    """
    return _fill_order(tensor.stride())


def _fill_order(strides: Sequence[int]) -> list[int]:
    last = len(strides) - 1
    order = sorted(range(last, -1, -1), key=lambda dim: strides[dim])
    return [last, *(dim for dim in order if dim != last)]


def dense_order(tensor: Tensor) -> list[int]:
    """The fill order of a dense tensor: ``strides_for(tensor.shape, dense_order(tensor))`` are its strides."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (strides[dim], shape[dim]))


def strides_for(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Dense strides of ``shape`` filled in ``order``."""
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return strides


def empty_in_order(
    like: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """Uninitialised tensor of ``shape`` on ``like``'s device, dense in ``order``."""
    return like.new_empty_strided(list(shape), strides_for(shape, order), dtype=dtype or like.dtype)


def empty_like_filled(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """:func:`empty_in_order` in the fill order of ``like``, for launch paths (remembers the strides)."""
    return like.new_empty_strided(shape, _filled_strides(shape, like.stride()), dtype=dtype)


@functools.lru_cache(maxsize=1024)
def _filled_strides(shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    return strides_for(shape, _fill_order(strides))


@functools.lru_cache(maxsize=1024)
def _known_strides(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(strides_for(shape, order))


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """``tensor`` itself if it is dense in ``order`` and owns its memory from the start, else a copy that is."""
    if tensor.stride() == _known_strides(tensor.shape, tuple(order)) and tensor.storage_offset() == 0:
        return tensor
    return empty_in_order(tensor, tensor.shape, order).copy_(tensor)
