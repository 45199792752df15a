"""Tools that some tests need and a machine may lack.

A missing tool skips the test, saying which tool. Where nothing may be skipped (continuous integration), the
environment variable `SPRINGTIDE_REQUIRE=kubectl,helm,promtool` turns that skip into a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest


def is_required(tool: str, environ: Mapping[str, str]) -> bool:
    """Say whether `SPRINGTIDE_REQUIRE` (comma separated) names the tool."""
    return tool in {name.strip() for name in environ.get("SPRINGTIDE_REQUIRE", "").split(",")}


def require_protoc() -> dict[str, str]:
    """Return the environment in which Python finds the protocol's generator; as `require_tool` without it."""
    folder = Path(__file__).resolve().parents[2] / ".tools" / "protoc"
    if (folder / "grpc_tools").is_dir():
        return os.environ | {"PYTHONPATH": str(folder)}
    missing = "the protocol's generator is not in .tools/protoc: run make tools"
    if is_required("protoc", os.environ):
        pytest.fail(f"{missing} (SPRINGTIDE_REQUIRE names it)", pytrace=False)
    pytest.skip(missing)


def require_tool(tool: str) -> str:
    """Return the tool's path; skip the test when it is missing, or fail it when it is required."""
    path = shutil.which(tool)
    if path is not None:
        return path
    if is_required(tool, os.environ):
        pytest.fail(
            f"{tool} is not on PATH, and SPRINGTIDE_REQUIRE names it: run make tools, or install {tool}",
            pytrace=False,
        )
    pytest.skip(
        f"{tool} is not on PATH (make tools brings helm and promtool; kubectl comes from your distribution)"
    )
