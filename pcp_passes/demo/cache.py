# SPDX-License-Identifier: Apache-2.0
"""Directories that are written once and then only read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_once(target: Path, write: Callable[[Path], None]) -> Path:
    """``target``, made by ``write(scratch)`` unless it is already there.

    ``write`` fills a scratch directory beside it, which is renamed when complete: a reader never sees half of it, an
    interrupted write leaves nothing under the final name, and of several processes the first to finish wins.
    Parents are made. Whatever ``write`` raises is passed on.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            # Another process was first: a directory with contents cannot be renamed onto.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
