"""Where the native sources are."""

from __future__ import annotations

from pathlib import Path


def native_sources(family: str) -> Path:
    """Folder ``csrc/<family>``: beside the package in a checkout, inside it (``magi_flex/_csrc``) once installed."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_csrc" / family
    return installed if installed.is_dir() else package.parent / "csrc" / family
