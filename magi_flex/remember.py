"""What was found out is remembered in a dictionary that does not grow without end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


def remembered(memo: dict[Hashable, T], what: Hashable, build: Callable[[], T], most: int) -> T:
    """``build()``, or what it gave earlier for the same ``what``; a ``memo`` of ``most`` entries begins anew."""
    try:
        return memo[what]
    except KeyError:
        value = build()
    if len(memo) >= most:
        memo.clear()
    memo[what] = value
    return value
