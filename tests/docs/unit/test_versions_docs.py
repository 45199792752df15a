"""The page of versions says what pyproject.toml asks for, and the generator is no newer than that."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from version_matrix import LOWEST, NEWEST, OLDEST_TORCH, Row, table

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
ASKED = {
    requirement.name: requirement
    for text in [
        *PROJECT["dependencies"],
        *(line for extra in ("worker", "operator") for line in OPTIONAL[extra]),
    ]
    for requirement in [Requirement(text)]
}
PAGE = dict(
    re.findall(r"^\| (\S+)[^|]* \| ([0-9.]+) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
)


def lowest(name: str) -> str:
    """Return the version that pyproject.toml asks for, at least."""
    [bound] = [bound.version for bound in ASKED[name].specifier if bound.operator == ">="]
    return bound


@pytest.mark.parametrize("name", ["torch", "grpcio", "protobuf", "numpy", "kopf", "kubernetes"])
def test_lowest_version_is_the_one_that_is_asked_for(name: str) -> None:
    assert PAGE[name] == lowest(name)


def test_lowest_python_is_the_one_that_is_asked_for() -> None:
    assert PROJECT["requires-python"] == f">={PAGE['Python']}"


def test_matrix_tries_the_oldest_torch() -> None:
    assert OLDEST_TORCH.startswith(lowest("torch"))


@pytest.mark.parametrize(("tool", "name"), [("grpcio-tools", "grpcio"), ("protobuf", "protobuf")])
def test_generator_is_as_old_as_the_lowest_version(tool: str, name: str) -> None:
    lines = (ROOT / "protocol/protoc_requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins[tool] == lowest(name)


def test_generated_code_checks_no_newer_version() -> None:
    for file in (ROOT / "protocol/springtide_protocol").glob("*_pb2*.py"):
        text = file.read_text()
        assert "ValidateProtobufRuntimeVersion" not in text
        for version in re.findall(r"GRPC_GENERATED_VERSION = '(.+)'", text):
            assert version == lowest("grpcio")


def test_table_says_what_was_left_out_and_why() -> None:
    rows = [
        Row("3.11", LOWEST, {"grpcio": "1.64.3"}, "7 passed"),
        Row("3.12", NEWEST, {}, "1 failed", "all that needs torch: no build", failed=True),
        Row("3.14", LOWEST, skipped="no Python 3.14 on this machine"),
    ]
    first, second, third = table(rows).splitlines()[2:]
    assert first.startswith("| 3.11 | lowest | 1.64.3 | - |")
    assert first.endswith("| 7 passed |")
    assert second.endswith("| 1 failed; left out: all that needs torch: no build |")
    assert third.endswith("| not run; left out: no Python 3.14 on this machine |")
