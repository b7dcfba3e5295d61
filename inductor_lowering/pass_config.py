"""Our pass in Inductor's configuration, of which each thread has one of its own from torch 2.13 on.

What is switched on holds for the process, so a thread's configuration is brought in line with it whenever Dynamo
traces a call of flex_attention there, before Inductor reads it.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config

from inductor_lowering.joint_pass import JointPass
from inductor_lowering.torch_compat import custom_passes


@torch._dynamo.disable  # also called by frames that Dynamo gave up on, whose callees it tries to compile
def configure(backend: str | None) -> None:
    """Let what this thread compiles run our pass for ``backend``, or not if None; the user's passes stay."""
    held = inductor_config.joint_custom_pre_pass
    passes = custom_passes(held)
    if backend is not None:
        if len(passes) != 1 or not isinstance(passes[0], JointPass) or passes[0].backend != backend:
            inductor_config.joint_custom_pre_pass = joint_pass(backend, held)
    elif any(isinstance(p, JointPass) for p in passes):
        users = users_passes(held)
        inductor_config.joint_custom_pre_pass = (users[0] if len(users) == 1 else users) or None


def joint_pass(backend: str, config_value: Any) -> JointPass:
    """Our pass, which runs the user's passes in this value of Inductor's option first."""
    return JointPass(backend, users_passes(config_value), source_hash())


def users_passes(config_value: Any) -> list[Any]:
    passes = custom_passes(config_value)
    earlier = [p for ours in passes if isinstance(ours, JointPass) for p in ours.before]
    return [*earlier, *(p for p in passes if not isinstance(p, JointPass))]


@functools.cache
def source_hash() -> str:
    """Identifies our own code in compile caches."""
    digest = hashlib.sha256()
    for package in ("inductor_lowering", "magi_flex"):
        root = Path(__file__).parent.parent / package
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
