"""Tests of Triton kernels on Triton's interpreter; tests/test_triton.py runs them in a process of their own.

Whether ``triton.jit`` interprets or compiles is decided when a kernel is defined, for the whole process.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not interpreted:
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_for_numpy(tensor: type, scope: object) -> None:
        """Triton 3.6 makes numbers of arrays of one element in a way that NumPy 2.4 no longer allows."""
        _patch_tensor(tensor, scope)  # type: ignore[arg-type]
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = _patch_tensor_for_numpy

    # For every call of a function the interpreter replaces the functions of triton.language, which takes ten
    # milliseconds; once for each launch and each kind of function (ours, Triton's own) is enough.
    _patched: set[bool] = set()
    _launch = interpreter.GridExecutor.__call__

    def _launch_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        _patched.clear()
        _launch(self, *args, **kwargs)

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_library = self.fn.__module__.startswith("triton.")
        if is_library not in _patched:
            interpreter._patch_lang(self.fn)
            _patched.add(is_library)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = _launch_and_forget
    interpreter.InterpretedFunction.__call__ = _call


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions at test sizes."""
    from magi_flex.kernels import triton_backend
    from magi_flex.kernels.triton_configs import Tiles

    sizes = {"forward": Tiles(32, 64, 4, 1), "kv": Tiles(64, 32, 4, 1), "q": Tiles(32, 64, 4, 1)}
    monkeypatch.setattr(triton_backend, "tiles_for", lambda direction, *others: sizes[direction])
