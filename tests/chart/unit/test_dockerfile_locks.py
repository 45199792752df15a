"""The packages of images: deploy/locks/, held to pyproject.toml, constraints.txt and this environment."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from chart_render import ROOT
from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.requirements import (
    BUILD,
    EXTRAS,
    IMAGES,
    TORCH,
    TORCH_NEEDS,
    Pin,
    base_error,
    main,
    normalized,
    read_lock,
    requirements,
    without_installed,
    write,
)

PYPROJECT = (ROOT / "pyproject.toml").read_text()
LOCK = (ROOT / "deploy/locks/images.txt").read_text()
PINS = read_lock(LOCK)
TORCH_PINS = read_lock((ROOT / "deploy/locks/torch.txt").read_text())
DEVELOPMENT = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
DIGEST = "sha256:" + "0" * 64


def environments() -> list[Environment]:
    result = []
    for machine in ("x86_64", "aarch64"):
        for python in ("3.11", "3.12", "3.13"):
            environment = default_environment()
            environment["platform_machine"], environment["platform_system"] = machine, "Linux"
            environment["python_version"], environment["python_full_version"] = python, python + ".9"
            result.append(environment)
    return result


def pins_of(image: str) -> dict[str, Pin]:
    sets = {image, *(["examples"] if image == "all" else [])}
    torch = image in {"worker", "ps", "all", "examples"}
    wanted = sets | ({TORCH_NEEDS} if torch else set()) | ({"worker"} if image == "examples" else set())
    own = {pin.name: pin for pin in PINS if wanted & set(pin.sets)}
    return own | ({pin.name: pin for pin in TORCH_PINS} if torch else {})


@pytest.mark.slow
@pytest.mark.parametrize("image", [*IMAGES, *EXTRAS])
def test_image_has_what_its_parts_need_and_no_more(image: str) -> None:
    """Follow the metadata of what is installed here, for every machine and Python of an image."""
    pins = pins_of(image)
    needed: set[str] = set()
    for environment in environments():
        waiting = [Requirement(line) for line in requirements(PYPROJECT, (IMAGES | EXTRAS)[image])]
        seen = set()
        while waiting:
            need = waiting.pop()
            name = normalized(need.name)
            extras = ("", *sorted(need.extras))
            if (name, extras) in seen:
                continue
            seen.add((name, extras))
            needed.add(name)
            assert name in pins, f"{image} lacks {need}: make lock"
            assert need.specifier.contains(Version(pins[name].version), prereleases=True), (
                f"{need}: make lock"
            )
            if TORCH.match(name) and name != "torch":
                continue  # another build is installed here
            for line in distribution(name).requires or []:
                further = Requirement(line)
                marker = further.marker
                if TORCH.match(further.name):
                    continue
                if marker is None or any(
                    marker.evaluate({**environment, "extra": extra}) for extra in extras
                ):
                    waiting.append(further)
    # Of a worker with examples only the examples are looked at: what torch needs is the worker's test.
    own = {
        name
        for name, pin in pins.items()
        if not TORCH.match(name) and (image != "examples" or image in pin.sets)
    }
    own -= {name for name in own if image == "all" and "examples" in pins[name].sets}
    assert own - needed <= {"setuptools"}, "make lock"  # torch asks for it where Python is 3.12 or newer


def test_versions_are_those_that_tests_run_with() -> None:
    development = {normalized(name): version for name, version in DEVELOPMENT.items()}
    other = {
        pin.name: (pin.version, development.get(pin.name))
        for pin in [*PINS, *TORCH_PINS]
        if pin.version != development.get(pin.name) and not re.match(r"^(triton|nvidia-|cuda-)", pin.name)
    }
    assert not other, "make lock, or constraints.txt"


def test_no_tool_of_development_is_in_an_image() -> None:
    tools = {"pytest", "mypy", "ruff", "hypothesis", "import-linter", "cyclonedx-python-lib"}
    project = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    assert tools <= {normalized(Requirement(line).name) for line in [*project["dev"], *project["sbom"]]}
    assert not {pin.name: pin.sets for pin in PINS if pin.name in tools and set(pin.sets) & set(IMAGES)}


def test_backend_of_the_wheel_is_pinned() -> None:
    wanted = [Requirement(line) for line in tomllib.loads(PYPROJECT)["build-system"]["requires"]]
    pins = {pin.name: pin for pin in PINS if BUILD in pin.sets}
    assert {item.name for item in wanted} == set(pins)
    assert all(item.specifier.contains(pins[item.name].version) for item in wanted)


def test_every_pin_has_hashes_and_nothing_names_an_index() -> None:
    for text in (LOCK, (ROOT / "deploy/locks/torch.txt").read_text()):
        assert all(len(set(pin.hashes)) == len(pin.hashes) >= 1 for pin in read_lock(text))
        assert "://" not in text
        assert "".join(pin.text() for pin in read_lock(text)) == "".join(
            line
            for line in text.splitlines(keepends=True)
            if not line.startswith("# ") or line.startswith("# for: ")
        )


@pytest.mark.parametrize(
    "line",
    ["--extra-index-url http://example.com", "kopf>=1.45.0 \\", "kopf @ http://example.com/kopf.whl", "-e ."],
)
def test_lock_with_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1: neither NAME==VERSION"):
        read_lock(line + "\n    --hash=sha256:" + "0" * 64 + "\n")


def test_pin_without_hash_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kopf==1\.45\.0 has no hash"):
        read_lock("kopf==1.45.0 \\\n")


def test_files_of_an_image_split_off_what_torch_needs(tmp_path: Path) -> None:
    write(tmp_path, LOCK)
    files = {file.stem: {pin.name for pin in read_lock(file.read_text())} for file in tmp_path.glob("*.txt")}
    assert {"sympy", "jinja2"} <= files["worker-torch"]
    assert not files["worker-torch"] & files["worker"]
    assert not {"sympy", "torch", "scikit-learn", "pytest"} & files["worker"]
    assert "scikit-learn" in files["examples"]
    assert not files["examples"] & files["worker"]
    assert "torch" not in set().union(*files.values())
    assert not {"numpy", "cel-python", "scikit-learn"} & files["operator"]


def test_what_the_base_has_is_kept_in_its_version() -> None:
    text = "".join(pin.text() for pin in PINS if pin.name in {"numpy", "grpcio"})
    assert [pin.name for pin in read_lock(without_installed(text, "NumPy"))] == ["grpcio"]
    assert without_installed(text, "springtide-is-not-there") == text


def test_base_needs_a_digest_or_leave() -> None:
    assert base_error(f"python:3.11@{DIGEST}") is None
    assert base_error("python:3.11", "allowed") is None
    for image in ("python:3.11", "python", "python@sha256:0", f"python@{DIGEST}x"):
        error = base_error(image)
        assert error is not None
        assert image in error
        assert "--build-arg UNPINNED_BASE=allowed" in error
    assert base_error("python:3.11", "yes") is not None


def test_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["base", "python:3.11", ""]) == 1
    assert "without a digest" in capsys.readouterr().err
    assert main(["base", f"python@{DIGEST}", ""]) == 0
    assert main(["nothing"]) == 2


def test_requirements_follow_extras_of_extras() -> None:
    text = """
[project]
dependencies = ["grpcio>=1"]
[project.optional-dependencies]
operator = ["kopf>=1"]
cli = ["springtide[operator]", "rich"]
local = ["springtide[cli,operator]", "psutil"]
"""
    assert requirements(text, ("local",)) == ["grpcio>=1", "psutil", "rich", "kopf>=1"]
    with pytest.raises(KeyError):
        requirements(text, ("gone",))


def test_operator_needs_no_torch() -> None:
    needs = requirements((ROOT / "pyproject.toml").read_text(), IMAGES["operator"])
    assert not [line for line in needs if line.startswith(("torch", "numpy", "cel-python"))]
