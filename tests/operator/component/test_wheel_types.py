"""A user's program is checked against the built wheel: every package of it says that it has types."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
from springtide.client import TrainingClient


def train(lr: float) -> None: ...


client = TrainingClient(local=True)
job = client.train(train, (1, 8), arguments={"lr": 0.1})
reveal_type(job.values)
reveal_type(job.wait().step)
reveal_type(job.logs())
reveal_type(job.logs(follow=True))
job.scale("3")
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_has_types_for_its_users(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copied = run("git", "clone", "-q", "--shared", str(ROOT), str(source))
    if copied.returncode:
        pytest.skip(f"no checkout to build from: {copied.stderr.strip()}")
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("--disable-pip-version-check", "-w", str(tmp_path / "wheels"), str(source)),
    )
    if built.returncode:
        pytest.skip(f"pip cannot build the wheel: {built.stderr.strip()[-500:]}")
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        packages = {
            name.split("/")[0] for name in files if name.count("/") == 1 and name.endswith("__init__.py")
        }
        assert len(packages) == 10
        assert [name for name in packages if f"{name}/py.typed" not in files] == []
        assert run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")).returncode == 0
        [site] = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
        archive.extractall(site)
    (tmp_path / "program.py").write_text(PROGRAM)
    python = str(tmp_path / "venv" / "bin" / "python")
    checked = run(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", python),
        *("--cache-dir", str(tmp_path / "cache"), "program.py"),
        cwd=tmp_path,
    )
    told = re.findall(r'Revealed type is "([^"]+)"', checked.stdout)
    assert [re.sub(r"\b(builtins|typing|collections\.abc)\.", "", one) for one in told] == [
        "dict[str, float]",
        "int | None",
        "str",
        "Iterator[str]",
    ], checked.stdout + checked.stderr
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, checked.stdout
    assert 'Argument 1 to "scale"' in errors[0]
