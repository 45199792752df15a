"""The Dockerfile's own COPY and pip steps, run into empty folders and virtual environments.

Container engines are not everywhere; what can go wrong in these steps is seen without one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from chart_dockerfile import Build, parse
from chart_render import ROOT

from springtide_operator.api import names

MAX_PACKAGES = 160 * 2**20  # bytes; a half of it is the Kubernetes client, which has all models twice
_NO_INDEX = (
    "Could not find a version that satisfies",
    "No matching distribution",
    "Connection",
    "Temporary failure",
)

pytestmark = pytest.mark.timeout(240)


def new_build(folder: Path, context: Path = ROOT, **given: str) -> Build:
    arguments, stages = parse((ROOT / "Dockerfile").read_text())
    # Without pip's bytecode: it doubles neither size nor truth, only time. (0, since pip takes the variable's
    # value for that of what the option denies.)
    return Build(context, folder, stages, arguments, given, {"PIP_NO_COMPILE": "0"})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Yield a build with the wheel stage built; skip where pip finds no package index."""
    result = new_build(tmp_path_factory.mktemp("image"))
    build_or_skip(lambda: result.build("wheel"))
    return result


def build_or_skip(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError as error:
        if any(sign in str(error) for sign in _NO_INDEX):
            pytest.skip(f"pip reaches no package index: {str(error).splitlines()[-1]}")
        raise


@pytest.mark.slow
def test_operator_image(build: Build) -> None:
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
        "print([name for name in ('torch', 'springtide') if name in sys.modules])"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr

    # What is in there is what the lock says, and the image says so itself.
    folder = build.root("operator") / "opt/springtide"
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (folder / "requirements.txt").read_text(), re.MULTILINE))
    bill = json.loads((folder / "sbom/operator.cdx.json").read_text())
    listed = {
        item["name"]: item["version"] for item in bill["components"] if item["purl"].startswith("pkg:pypi/")
    }
    assert listed == locked | {"springtide": names.PROGRAM_VERSION}
    text = (folder / "sbom/operator.licences.txt").read_text()
    assert f"springtide {names.PROGRAM_VERSION}: Apache-2.0" in text
    assert "certifi" not in listed or "MPL-2.0" in text
    # The licence's own words are in the image, where the list says.
    place = re.search(r"^aiohttp .*\n    (?P<file>\S+)", text, re.MULTILINE)
    assert place is not None
    assert (packages / place["file"]).is_file()
    # What wrote it is gone.
    assert not (build.root("operator") / "tmp/sbom").exists()
    assert not (packages / "cyclonedx").exists()


@pytest.mark.slow
def test_worker_image_keeps_the_torch_of_its_base(build: Build) -> None:
    """Let this interpreter play a base image with torch; pip only says which packages it would install."""
    build.extra_environment = {"PIP_DRY_RUN": "1"}
    build.output = ""
    build_or_skip(lambda: build.build("worker", python=Path(sys.executable)))
    root = build.root("worker")
    locked = (root / "opt/springtide/worker.txt").read_text()

    # All but numpy, torch and what torch needs is the lock's, with hashes, whatever the base has.
    assert "fsspec==" in locked
    assert "grpcio==" in locked
    assert locked.count("--hash=sha256:") > locked.count("==")
    assert "numpy" not in locked
    assert (root / "opt/springtide/worker-torch.txt").read_text() == ""
    assert (root / "springtide/examples").is_dir()
    assert "Would install" not in build.output or "torch" not in build.output.partition("Would install")[2]
    assert version("torch")


def test_base_without_torch_gets_the_locked_numpy(build: Build, tmp_path: Path) -> None:
    plain = tmp_path / "worker.txt"
    shutil.copy(build.root("wheel") / "requirements/worker.txt", plain)
    done = subprocess.run(
        # As in an image without numpy: this interpreter without its packages.
        [sys.executable, "-S", str(ROOT / "deploy/requirements.py"), "keep", "numpy", str(plain)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"numpy=={version('numpy')}" in plain.read_text()


def test_file_with_another_hash_ends_the_build(build: Build, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for entry in ROOT.iterdir():
        if entry.name != "deploy" and not entry.name.startswith("."):
            (context / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "deploy", context / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    lock = context / "deploy/locks/images.txt"
    text = lock.read_text()
    start = text.index("\nsetuptools==")
    block = text[start : text.index("\n# for:", start)]
    lock.write_text(text.replace(block, re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, block)))
    spoiled = new_build(tmp_path / "image", context)

    with pytest.raises(RuntimeError, match="DO NOT MATCH THE HASHES"):
        spoiled.build("wheel")


def test_base_without_digest_ends_the_build(tmp_path: Path) -> None:
    named = new_build(tmp_path / "named", BASE="registry.example.com/torch:2.13")

    with pytest.raises(RuntimeError, match=r"'registry.example.com/torch:2.13' is named without a digest"):
        named.build("wheel")
