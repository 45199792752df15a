"""The Dockerfile's own COPY and pip steps, run into empty folders and virtual environments.

Container engines are not everywhere; what can go wrong in these steps is seen without one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from chart_dockerfile import Build, parse
from chart_render import ROOT

from springtide_operator.api import names

MAX_PACKAGES = 120 * 2**20  # bytes
_NO_INDEX = (
    "Could not find a version that satisfies",
    "No matching distribution",
    "Connection",
    "Temporary failure",
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """With the wheel stage built; skipped where pip finds no package index."""
    arguments, stages = parse((ROOT / "Dockerfile").read_text())
    result = Build(ROOT, tmp_path_factory.mktemp("image"), stages, arguments)
    # This interpreter has the build backend: no need to fetch it into an isolated environment. (0, since pip
    # takes the variable's value for that of what the option denies.)
    result.extra_environment = {"PIP_NO_BUILD_ISOLATION": "0"}
    build_or_skip(lambda: result.build("wheel", python=Path(sys.executable)))
    return result


def build_or_skip(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError as error:
        if any(sign in str(error) for sign in _NO_INDEX):
            pytest.skip(f"pip reaches no package index: {str(error).splitlines()[-1]}")
        raise


def test_operator_image(build: Build) -> None:
    # Without pip's bytecode: it doubles neither size nor truth, only time.
    build.extra_environment = {"PIP_NO_COMPILE": "0"}  # the same way round
    build_or_skip(lambda: build.build("operator"))
    python = build.python("operator")
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    files = [file for file in packages.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    size = sum(file.stat().st_size for file in files)
    assert size < MAX_PACKAGES, f"{size / 2**20:.0f} MB of packages"
    assert not (packages / "torch").exists()
    for command in (
        [str(python), "-m", "springtide_operator", "--version"],
        [str(python), "-m", "springtide_coordinator", "--version"],
        [str(python.with_name("springtide")), "--version"],
    ):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=build.root("operator") / "springtide",
            env={"PATH": str(python.parent), "PYTHONSAFEPATH": "1"},
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)
        assert names.PROGRAM_VERSION in done.stdout
    # The operator and the coordinator need all that they import, and nothing of torch.
    code = (
        "import sys, springtide_operator.handlers, springtide_coordinator.service, springtide_cli.main;"
        "print([name for name in ('torch', 'springtide', 'kubernetes') if name in sys.modules])"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_worker_image_keeps_the_torch_of_its_base(build: Build) -> None:
    """This interpreter plays a base image with torch; pip only says what it would install."""
    build.extra_environment = {"PIP_DRY_RUN": "1"}
    build_or_skip(lambda: build.build("worker", python=Path(sys.executable)))
    root = build.root("worker")
    constraints = (root / "opt/springtide/constraints.txt").read_text()

    assert constraints.splitlines()[0] == f"torch=={version('torch')}"
    assert (root / "springtide/examples").is_dir()
    assert "Would install" not in build.output or "torch" not in build.output.partition("Would install")[2]
