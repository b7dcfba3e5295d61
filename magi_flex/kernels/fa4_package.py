"""The flash-attn-4 package: whether it is there, whether its release is one that was looked at, and its parts."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from types import ModuleType
from typing import NamedTuple

PACKAGE = "flash-attn-4"
# Releases whose interface, tile sizes and index conventions the backend knows, newest first.  The extra ``fa4`` in
# pyproject.toml names the same range.
RELEASES = ("4.0.0b36",)


class Package(NamedTuple):
    """Its modules."""

    interface: ModuleType
    block_sparsity: ModuleType


@functools.cache
def missing_package() -> str | None:
    """Why the package cannot be used, or None.  Imports nothing."""
    remedy = "pip install 'magi-flex[fa4]'"
    try:
        release = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"needs {PACKAGE} ({remedy})"
    if release not in RELEASES:
        return f"knows {PACKAGE} {' and '.join(RELEASES)}, not {release} ({remedy})"
    return None


@functools.cache
def package() -> Package:
    """Raises ImportError where it is broken."""
    return Package(*(importlib.import_module(f"flash_attn.cute.{name}") for name in Package._fields))
