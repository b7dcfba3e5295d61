"""magi_flex: a FlexAttention backend for long contexts.

    import magi_flex

    magi_flex.enable()                                # or torch.compile(model, backend="magi_flex")
    mask = magi_flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)

Importing the package is cheap: torch's compiler and the kernels are loaded when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_lowering.install import disable, enable, is_enabled
    from magi_flex.attention_sink import with_sink
    from magi_flex.block_mask import create_block_mask, from_attn_slices, plan
    from magi_flex.explain_mask import explain

__version__ = "0.1.0"

_HOMES = {
    "enable": "inductor_lowering.install",
    "disable": "inductor_lowering.install",
    "is_enabled": "inductor_lowering.install",
    "create_block_mask": "magi_flex.block_mask",
    "from_attn_slices": "magi_flex.block_mask",
    "plan": "magi_flex.block_mask",
    "explain": "magi_flex.explain_mask",
    "with_sink": "magi_flex.attention_sink",
}
_SUBMODULES = ("mods", "distributed")

__all__ = [
    "create_block_mask",
    "disable",
    "distributed",
    "enable",
    "explain",
    "from_attn_slices",
    "is_enabled",
    "mods",
    "plan",
    "with_sink",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"magi_flex.{name}")
    else:
        raise AttributeError(f"module 'magi_flex' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
