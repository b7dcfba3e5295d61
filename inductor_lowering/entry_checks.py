"""FlexAttention's own checks refuse on a CPU what our kernels can do: training, and the largest scores as a result.

Both checks are wrapped so that they let these through when our kernels take the call; and so is the warning that an
eager call writes out all scores, which is not true of our kernels.  Dynamo traces the wrappers and guards on
ACTIVE_BACKEND, so a function compiled under one choice is compiled again under another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_attention_module
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock

from inductor_lowering import captured_floats
from inductor_lowering.pass_config import configure
from inductor_lowering.torch_compat import current_compiler
from magi_flex.kernels.checks import Layout, check_inputs

ACTIVE_BACKEND: str | None = None  # what enable() chose
COMPILERS: list[Callable[..., Any]] = []  # functions that compile with our kernels whether enabled or not

_stock_validate_device = flex_attention_module._validate_device
_stock_apply_kernel_options = flex_attention_module._apply_kernel_options
_stock_warn_once = flex_attention_module._warn_once
_stock_compilation_env = flex_attention_module.setup_compilation_env


def install() -> None:
    """Wrap the checks; without ACTIVE_BACKEND and outside of our COMPILERS they do what they did."""
    flex_attention_module._validate_device = _validate_device
    flex_attention_module._apply_kernel_options = _apply_kernel_options
    flex_attention_module._warn_once = _warn_once
    flex_attention_module.setup_compilation_env = _CompilationEnvironment
    captured_floats.install(serving)


@torch._dynamo.assume_constant_result
def _configure_this_thread() -> None:
    configure(ACTIVE_BACKEND)


@torch._dynamo.assume_constant_result
def _compiling_with_us() -> bool:
    compiler = current_compiler()
    return any(compiler is ours for ours in COMPILERS)


def serving() -> bool:
    """Whether our kernels take the calls that are made, or compiled, now."""
    return ACTIVE_BACKEND is not None or _compiling_with_us()


def _served_on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu" and serving()


def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    _configure_this_thread()
    if serving():
        check_inputs(Layout.of(query, key, value))
    if not _served_on_cpu(query):
        _stock_validate_device(query, key, value)


def _apply_kernel_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any = None,
) -> Any:
    wants_max = return_aux is not None and return_aux.max_scores and _served_on_cpu(query)
    if wants_max:
        return_aux = flex_attention_module.AuxRequest(lse=return_aux.lse)
    options = _stock_apply_kernel_options(query, key, value, return_lse, kernel_options, return_aux)
    if wants_max:
        options["OUTPUT_MAX"] = True
    if ACTIVE_BACKEND is not None:
        # Always there, because Dynamo guards on the values of known options but not on which options there are.
        options.setdefault("magi_backend", ACTIVE_BACKEND)
    return options


def _warn_once(warning_id: str, message: str, category: type[Warning] = UserWarning) -> None:
    if ACTIVE_BACKEND is None or warning_id != "flex_attention_performance":
        _stock_warn_once(warning_id, message, category)


class _CompilationEnvironment:
    """Stock's context of an eager call, which puts FX's global state aside and brings it back.

    Done while another thread traced, that thread's state was brought back for good, and nothing compiled any more.
    """

    def __init__(self) -> None:
        self._stock = _stock_compilation_env()

    def __enter__(self) -> Any:
        with compile_lock:
            return self._stock.__enter__()

    def __exit__(self, *error: Any) -> Any:
        with compile_lock:
            return self._stock.__exit__(*error)
