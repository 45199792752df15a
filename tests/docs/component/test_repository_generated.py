"""Generated files are what their source says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from required import require_protoc

ROOT = Path(__file__).resolve().parents[3]
PROTOS = sorted(path.relative_to(ROOT) for root in ("protocol",) for path in (ROOT / root).rglob("*.proto"))


def test_there_are_protocols() -> None:
    assert PROTOS


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_the_protocol_is_generated_from_its_source(proto: Path, tmp_path: Path) -> None:
    root = proto.parts[0]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", root, *outputs, str(proto)],
        cwd=ROOT,
        env=require_protoc(),
        check=True,
        timeout=60,
    )
    written = [path for path in tmp_path.rglob("*_pb2*") if path.is_file()]
    assert len(written) == 3
    for path in written:
        here = ROOT / root / path.relative_to(tmp_path)
        assert here.read_text() == path.read_text(), f"{here} is older than {proto}: run make generate"
