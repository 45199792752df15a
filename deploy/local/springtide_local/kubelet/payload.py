"""Writing the files of a volume all at once: whoever reads sees all old ones or all new ones.

The files lie in a folder `..TIME`, to which the link `..data` leads; the names that a container knows are
links through `..data`. Replacing that one link replaces everything, as a kubelet does it. So a token and the
certificate beside it always belong together, and a program that watches a volume sees `..data` move.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_DATA = "..data"


def write_payload(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> bool:
    """Make the volume's folder hold exactly these files; return whether anything changed.

    Args:
        folder: The volume's folder, which exists.
        files: Content and mode by path within the volume.
    """
    current = folder / _DATA
    if current.is_symlink() and _read(current) == dict(files):
        return False
    old = folder / os.readlink(current) if current.is_symlink() else None
    fresh = Path(tempfile.mkdtemp(prefix=time.strftime("..%Y_%m_%d_%H_%M_%S."), dir=folder))
    fresh.chmod(0o755)
    for path, (content, mode) in files.items():
        file = fresh / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    link = folder / "..data_tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    os.replace(link, current)
    names = {path.partition("/")[0] for path in files}
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path(_DATA) / name)
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in names and entry.is_symlink():
            entry.unlink()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return True


def _read(folder: Path) -> dict[str, tuple[bytes, int]]:
    top = folder.resolve()
    return {
        str(file.relative_to(top)): (file.read_bytes(), file.stat().st_mode & 0o7777)
        for file in top.rglob("*")
        if file.is_file()
    }
