"""Which backend serves a request, and why: one list, fastest first."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from magi_flex.kernels.request import AttentionRequest, Backend, RequestFacts, ScoreProgram
from magi_flex.kernels.score_split import JOINT_ARGUMENTS, SCORE_ARGUMENTS, has_linear_gradient, score_ops

logger = logging.getLogger("magi_flex")


class Entry(NamedTuple):
    """A backend by name; its module is imported when it is first considered."""

    name: str
    module: str
    cls: str


# Fastest first.
BACKENDS: tuple[Entry, ...] = (
    Entry("ffa", "magi_flex.kernels.ffa", "FfaBackend"),
    Entry("fa4", "magi_flex.kernels.fa4", "Fa4Backend"),
    Entry("triton", "magi_flex.kernels.triton_backend", "TritonBackend"),
    Entry("cpu", "magi_flex.kernels.cpu", "CpuBackend"),
    Entry("tiled", "magi_flex.kernels.tiled_torch", "TiledBackend"),
)
AUTO = "auto"
SLOW = "tiled"  # serves everything, and is the last of ours for that
_STOCK_LEAST_HEAD_DIM = 16


def backend_names() -> list[str]:
    return [entry.name for entry in BACKENDS]


def check_choice(choice: str, *others: str) -> str:
    """``choice`` itself; raises ValueError if it is no backend and none of ``others`` that are allowed here."""
    allowed = [AUTO, *backend_names(), *others]
    if choice not in allowed:
        raise ValueError(f"backend: got {choice!r}, allowed are {', '.join(allowed)}")
    return choice


@functools.cache
def load(name: str) -> Backend | str:
    """The backend, or why its module cannot be imported."""
    for known, module, cls in BACKENDS:
        if known == name:
            try:
                return getattr(importlib.import_module(module), cls)()
            except ImportError as error:
                return f"{module} cannot be imported: {error}"
    raise ValueError(f"backend: got {name!r}, allowed are {', '.join(backend_names())}")


def explain_route(facts: RequestFacts, choice: str = AUTO) -> list[tuple[str, list[str]]]:
    """Every backend, fastest first, with the reasons why it does not serve such a request (none: it does).

    A reservation (see :meth:`Backend.reservations`) is a reason unless ``choice`` names the backend.
    """
    table = []
    for name in backend_names():
        backend = load(name)
        if isinstance(backend, str):
            table.append((name, [backend]))
            continue
        missing = backend.missing(facts.device)
        reasons = [missing] if missing else backend.objections(facts)
        if choice != name and not missing:
            reasons += [
                f"{what} has not run on a GPU yet, so it must be chosen by name (backend={name!r})"
                for what in backend.reservations(facts)
            ]
        table.append((name, reasons))
    return table


def stock_is_faster(facts: RequestFacts) -> str | None:
    """Why a compiled call that chose no backend is better left to PyTorch's own kernels, or None.

    On a GPU these are Triton kernels, which beat ``tiled`` by far where they serve the request; see also
    :meth:`Backend.behind_stock`.
    """
    if facts.device.type == "cpu" or facts.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if min(facts.head_dim, facts.v_head_dim) < _STOCK_LEAST_HEAD_DIM or facts.mixed_dtypes:
        return None
    table = dict(explain_route(facts))
    del table[SLOW]
    for name, reasons in table.items():
        if not reasons:
            backend = load(name)
            assert isinstance(backend, Backend)
            behind = backend.behind_stock(facts)
            if behind is None:
                return None
            reasons.append(behind)
    return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in table.items())


@functools.lru_cache(maxsize=1024)
def route(facts: RequestFacts, choice: str = AUTO) -> Backend:
    """The fastest backend that serves the request, or the chosen one.

    Raises ValueError if the chosen backend does not serve it; the message has the reasons.
    """
    check_choice(choice)
    table = explain_route(facts, choice)
    for name, reasons in table:
        if choice not in (AUTO, name):
            continue
        if not reasons:
            logger.debug("backend %s for %s; passed over: %s", name, facts, table)
            backend = load(name)
            assert isinstance(backend, Backend)
            return backend
        if choice == name:
            raise ValueError(
                f"backend: {name!r} was asked for but cannot serve this call ({'; '.join(reasons)}). "
                f"Choose another one, or 'auto'."
            )
    raise RuntimeError(f"no backend serves {facts}: {table}")


def call_facts(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    head_dims: tuple[int, int],
    heads: tuple[int, int] | None,
    score_steps: Sequence[type] | None,
    *,
    needs_backward: bool,
    score_grads: bool = False,
    has_bit_tiles: bool = False,
    deterministic: bool = False,
    wide_results: bool = False,
    index_map: bool = False,
    max_score: bool = False,
    score_ops: frozenset[str] = frozenset(),
    linear_gradient: bool = True,
) -> RequestFacts:
    """What routing looks at, of a call that is made or thought of.

    Args:
        dtypes: of query, key and value; head_dims: of query and key, and of value.
        heads: query heads and key/value heads; None while a graph with symbolic sizes is compiled.
        others: see RequestFacts; ``torch.use_deterministic_algorithms`` is taken into account here.
    """
    return _facts(
        device,
        dtypes[0],
        head_dims[0],
        head_dims[1],
        None if heads is None else heads[0],
        None if heads is None else heads[1],
        None if score_steps is None else tuple(score_steps),
        score_grads,
        needs_backward,
        has_bit_tiles,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        wide_results,
        any(dtype != dtypes[0] for dtype in dtypes),
        index_map,
        max_score,
        score_ops,
        linear_gradient,
    )


_facts = functools.lru_cache(maxsize=1024)(RequestFacts)  # which take longer to make than to find


def facts_of(request: AttentionRequest, needs_backward: bool) -> RequestFacts:
    """What routing looks at, of a request."""
    q, k, v, score = request.q, request.k, request.v, request.score
    index_map = score.index_map
    return call_facts(
        q.device,
        (q.dtype, k.dtype, v.dtype),
        (q.shape[3], v.shape[3]),
        (q.shape[1], k.shape[1]),
        None if score.steps is None else [type(step) for step in score.steps],
        needs_backward=needs_backward,
        score_grads=any(score.needs_grad),
        has_bit_tiles=request.plan.bit_tiles is not None,
        deterministic=request.deterministic,
        wide_results=request.wide_results,
        index_map=bool(
            index_map.b_offset or index_map.h_offset or index_map.q_index is not None or index_map.k_index is not None
        ),
        max_score=request.max_score,
        score_ops=_score_ops(score, needs_backward),
        linear_gradient=score.steps is not None or score.joint is None or has_linear_gradient(score.joint),
    )


def _score_ops(score: ScoreProgram, needs_backward: bool) -> frozenset[str]:
    if score.steps is not None or score.forward is None:
        return frozenset()
    ops = score_ops(score.forward, SCORE_ARGUMENTS)
    return ops | score_ops(score.joint, JOINT_ARGUMENTS) if needs_backward and score.joint is not None else ops
