"""Switching on and off: what is changed in torch, and how it is put back."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch._inductor.config as inductor_config

from inductor_lowering import direct_calls, eager, entry_checks
from inductor_lowering.pass_config import configure, joint_pass
from inductor_lowering.torch_compat import register_dynamo_backend
from magi_flex.kernels.route import AUTO, check_choice
from magi_flex.kernels.tile_plans import builder_choice, check_builder, choose_builder

_lock = threading.RLock()


class Enabled:
    """What :func:`enable` returns: leaving it as a context manager brings back the state from before."""

    def __init__(self, undo: Callable[[], None]):
        self._undo = undo

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo()


def enable(backend: str = AUTO, plans: str = AUTO) -> Enabled:
    """Let flex_attention use our kernels, compiled or called eagerly.

    Functions that are compiled already are compiled again when they are next called.  A ``joint_custom_pre_pass`` that
    was set in Inductor's configuration keeps running, before ours.

    Args:
        backend: "auto" (the fastest that serves a call) or one name for all calls that choose none themselves.
        plans: who builds tile plans on a GPU: "torch" (operations that wait for the device) or "device" (our kernels,
            which do not, so that a step can be captured in a CUDA graph); "auto" means the latter.

    Raises:
        ValueError: unknown backend or builder.
    """
    check_choice(backend)
    check_builder(plans)
    with _lock:
        before = entry_checks.ACTIVE_BACKEND, builder_choice()
        _switch(backend, plans)
    return Enabled(functools.partial(_switch, *before))


def disable() -> None:
    """Stock behaviour again, also for functions that were compiled while our kernels were switched on."""
    _switch(None)


def is_enabled() -> bool:
    return entry_checks.ACTIVE_BACKEND is not None


def _switch(backend: str | None, plans: str = AUTO) -> None:
    with _lock:
        choose_builder(plans)
        if backend is not None:
            register_dynamo_backend("magi_flex", magi_flex_backend)
            entry_checks.install()
        eager.install(backend)
        entry_checks.ACTIVE_BACKEND = backend
        configure(backend)


def magi_flex_backend(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="magi_flex")``: Inductor, with our kernels in this compilation.

    Args:
        mode, options: as for Inductor; ``options["magi_backend"]`` chooses a kernel backend.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    backend = check_choice(patches.pop("magi_backend", entry_checks.ACTIVE_BACKEND or AUTO))
    passes = patches.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = joint_pass(backend, passes)
    return compile_fx(module, inputs, config_patches=patches)


direct_calls.install()
entry_checks.install()  # the stock checks, unless magi_flex compiles or is enabled
entry_checks.COMPILERS.append(magi_flex_backend)
if torch.distributed.is_available():
    importlib.import_module("magi_flex.distributed.sharding").install()  # FlexAttention on DTensors
