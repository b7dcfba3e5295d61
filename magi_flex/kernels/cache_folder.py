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
    own = Path(tempfile.gettempdir()) / f"magi_flex-{os.getuid()}"
    own.mkdir(exist_ok=True, mode=0o700)
    if own.lstat().st_uid != os.getuid():  # who could put code of theirs there
        raise error(f"{own} belongs to another user: remove it, or make ~/.cache writable")
    folder = own / family
    folder.mkdir(exist_ok=True)
    return folder
