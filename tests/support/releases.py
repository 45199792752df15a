"""Other releases of this tree, for the tests of processes that are of different ones.

The last release is the newest tag before this commit; while there is no tag, the commit in tests/skew/base.
Its files come from git. The next release is a copy of this tree that says what no release says yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from required import is_required, require_protoc

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tests" / "skew" / "base"
PACKAGES = ("protocol", "operator", "worker", "ps")
LAST = "last-release"
"""Name that SPRINGTIDE_REQUIRE has for it."""
_PROTO = "protocol/springtide_protocol/coordinator.proto"


@dataclass(frozen=True, slots=True)
class Tree:
    """A release. folder: of its files."""

    name: str
    folder: Path

    @property
    def python_path(self) -> str:
        """Return the PYTHONPATH that has its packages."""
        return os.pathsep.join(str(self.folder / package) for package in PACKAGES)

    @property
    def script(self) -> Path:
        """Return its training script of tests."""
        return self.folder / "tests" / "support" / "worker_script.py"


TODAY = Tree("today", ROOT)


def last_release(folder: Path) -> Tree:
    """Export the last release; skip the test where its files cannot be had, or fail it if they are required.

    Args:
        folder: to be made.
    """
    try:
        commit = last_commit()
        archive = _git("archive", commit, "--", *PACKAGES, "tests/support")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        why = f"the files of the last release cannot be had from git: {said.decode(errors='replace').strip()}"
        if is_required(LAST, os.environ):
            pytest.fail(f"{why}; SPRINGTIDE_REQUIRE names {LAST}: clone with history and tags", pytrace=False)
        pytest.skip(f"{why} (a clone with history and tags has them)")
    folder.mkdir()
    unpack = folder / "tree.tar"
    unpack.write_bytes(archive)
    with tarfile.open(unpack) as files:
        # Python has filters since 3.11.4; what git has packed is ours.
        files.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return Tree("last", folder)


def last_commit() -> str:
    """Return the newest tag before this commit, or the commit that stands for one.

    Raises:
        CalledProcessError, OSError: git cannot say.
    """
    tags = _git("tag", "--list", "v[0-9]*", "--merged", "HEAD~1", "--sort=-version:refname").decode().split()
    return tags[0] if tags else BASE.read_text(encoding="utf-8").split()[0]


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def next_release(folder: Path) -> Tree:
    """Make a copy of this tree that speaks the next version, and says a kind of message and fields more.

    Args:
        folder: to be made.
    """
    for package in (*PACKAGES, "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    proto = folder / _PROTO
    text = proto.read_text(encoding="utf-8")
    for kind in ("WorkerMessage", "CoordinatorMessage", "ServerMessage", "ServerOrder"):
        text = _after(text, f"message {kind} {{\n  oneof message {{\n", "    Tide tide = 99;\n")
    for message in ("Hello", "Welcome", "Start", "Parked", "ServerHello", "SyncRequest", "SyncReply"):
        text = _after(text, f"message {message} {{\n", "  string tide = 99;\n")
    proto.write_text(text + "\nmessage Tide {\n  uint64 height = 1;\n}\n", encoding="utf-8")
    command = "-m grpc_tools.protoc -I protocol --python_out=protocol --grpc_python_out=protocol"
    subprocess.run(
        [sys.executable, *command.split(), _PROTO],
        cwd=folder,
        env=require_protoc(),
        check=True,
        capture_output=True,
        timeout=120,
    )
    for path, anchor, more in _SAYS:
        file = folder / path
        file.write_text(_after(file.read_text(encoding="utf-8"), anchor, more), encoding="utf-8")
    versions = folder / "protocol/springtide_protocol/versions.py"
    raised = versions.read_text(encoding="utf-8")
    for name in ("PROTOCOL_VERSION", "OLDEST_PROTOCOL_VERSION"):
        raised = _after(raised, f"\n{name}: Final = ", "1 + ")
    versions.write_text(raised, encoding="utf-8")
    return Tree("next", folder)


# (file, what stands there, what the next release says after it)
_SAYS = (
    (
        "protocol/springtide_protocol/session_client.py",
        "        hello.CopyFrom(self._hello())\n",
        '        hello.tide = "high"\n',
    ),
    (
        "protocol/springtide_protocol/session_client.py",
        "                        self._welcomed.set()\n",
        "                        outbox.put(pb.WorkerMessage(tide=pb.Tide(height=1)))\n",
    ),
    (
        "protocol/springtide_protocol/serve_client.py",
        "                        self._newest, self._connected = incarnation, True\n",
        "                        outbox.put(pb.ServerMessage(tide=pb.Tide(height=1)))\n",
    ),
    (
        "operator/springtide_coordinator/hub.py",
        "        self._take(event)\n        if stream.ended:\n            return\n",
        "        stream.put(pb.CoordinatorMessage(tide=pb.Tide(height=1)))\n",
    ),
    (
        "operator/springtide_coordinator/hub.py",
        "        stream.member = hello.server.id\n        self._take(event)\n",
        "        stream.put(pb.ServerOrder(tide=pb.Tide(height=1)))\n",
    ),
    (
        "operator/springtide_coordinator/reply.py",
        "        speaks=codec.speaks_to_proto(OWN),\n",
        '        tide="high",\n',
    ),
    (
        "operator/springtide_operator/coordinator_connection.py",
        "        speaks=speaks_to_proto(OWN),\n",
        '        tide="high",\n',
    ),
)


def _after(text: str, anchor: str, more: str) -> str:
    before, found, rest = text.partition(anchor)
    if not found:
        raise AssertionError(f"the copy of this tree has no {anchor!r}: mend tests/support/releases.py")
    return before + found + more + rest
