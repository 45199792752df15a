"""Container paths to real ones. Processes have no mounts of their own, so paths are rewritten where they
are handed over as text.

A container path counts where it starts on a boundary (the beginning of the text, after white space, a
quote, `=`, `,`, `:`, a bracket or a redirection, or after `file://`) and ends on one (`/`, one of those, or
the end), so that `/data` is found in `--dir=/data/x` and `/a:/data`, but not in `/database` or
`https://host/data`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

_BEFORE = r"(?:(?<![^\s=,:;'\"`()\[\]{}<>|&])|(?<=\bfile://))"
_AFTER = r"(?=/|[\s=,:;'\"`()\[\]{}<>|&*]|$)"


class PathMap:
    """Map of mount paths (absolute, as in the pod) to real paths. The longest one that fits wins."""

    def __init__(self, mounts: Mapping[str, Path]) -> None:
        self._mounts = {_normal(path): str(real) for path, real in mounts.items()}
        longest_first = sorted((path for path in self._mounts if path != "/"), key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in longest_first)
        self._pattern = re.compile(f"{_BEFORE}({alternatives}){_AFTER}") if longest_first else None

    def rewrite(self, text: str) -> str:
        """Every container path in the text replaced by the real one."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._mounts[match.group(1)], text)

    def resolve(self, path: str) -> Path:
        """One whole path. Outside of every mount it stays what it is: processes share the machine's file
        system.
        """
        normal = _normal(path)
        for mount in sorted(self._mounts, key=len, reverse=True):
            if normal == mount or normal.startswith(mount.rstrip("/") + "/"):
                return Path(self._mounts[mount] + normal[len(mount.rstrip("/")) :])
        return Path(normal)


def _normal(path: str) -> str:
    return posixpath.normpath(path).replace("//", "/")
