"""Running Triton kernels in tests: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the package triton is not installed")


def patch_once_a_launch() -> None:
    """For every call of a function the interpreter replaces the functions of triton.language, which takes ten
    milliseconds; once for each launch and each kind of function (ours, Triton's own) is enough."""
    from triton.runtime import interpreter

    patched: set[bool] = set()
    launch = interpreter.GridExecutor.__call__

    def launch_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_library = self.fn.__module__.startswith("triton.")
        if is_library not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(is_library)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_and_forget
    interpreter.InterpretedFunction.__call__ = call


if DEVICE == "cpu":
    patch_once_a_launch()
