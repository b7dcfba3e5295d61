"""Long sequences across ranks: dispatch, exchange plans, group collectives, staged attention, ContextParallel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magi_flex.distributed.context_parallel import ContextParallel, attend_local
    from magi_flex.distributed.cost_model import Costs, Shape
    from magi_flex.distributed.dispatch import Dispatch, solve_dispatch
    from magi_flex.distributed.group_collective import group_cast, group_reduce
    from magi_flex.distributed.group_plan import GroupPlan
    from magi_flex.distributed.measure import measure_costs
    from magi_flex.distributed.timeline import Timeline

_HOMES = {
    "ContextParallel": "context_parallel",
    "attend_local": "context_parallel",
    "Costs": "cost_model",
    "Shape": "cost_model",
    "Dispatch": "dispatch",
    "solve_dispatch": "dispatch",
    "group_cast": "group_collective",
    "group_reduce": "group_collective",
    "GroupPlan": "group_plan",
    "Timeline": "timeline",
    "measure_costs": "measure",
}
__all__ = [
    "ContextParallel",
    "Costs",
    "Dispatch",
    "GroupPlan",
    "Shape",
    "Timeline",
    "attend_local",
    "group_cast",
    "group_reduce",
    "measure_costs",
    "solve_dispatch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'magi_flex.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"magi_flex.distributed.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
