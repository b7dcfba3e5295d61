"""Where what is generated and compiled at run time is kept between runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder(family: str, error: type[Exception] = RuntimeError) -> Path:
    """A writable folder of this user's: ``$XDG_CACHE_HOME/magi_flex/<family>``, ``~/.cache/...``, or a temporary one.

    Raises ``error`` if the temporary folder belongs to another user.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "magi_flex" / family
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"magi_flex-{os.getuid()}" / family
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise error(f"{folder} belongs to another user: remove it, or make ~/.cache writable")
    return folder
