"""What can be said of the Dockerfile without building it."""

from __future__ import annotations

import json
import re

import pytest
from chart_dockerfile import chain, environment, parse, values
from chart_render import ROOT

from deploy.requirements import IMAGES, requirements
from springtide_operator.api import names

TEXT = (ROOT / "Dockerfile").read_text()
ARGUMENTS, STAGES = parse(TEXT)
TARGETS = sorted(IMAGES)
EACH = pytest.mark.parametrize("target", TARGETS)


def test_targets_are_the_images() -> None:
    assert set(STAGES) == {"wheel", "slim", *IMAGES}


@EACH
def test_user_is_not_root_and_stays_so(target: str) -> None:
    steps = chain(STAGES, target)
    assert values(steps, "USER") == ["65532:65532"]
    last = max(index for index, step in enumerate(steps) if step.word in {"RUN", "COPY"})
    assert [step.word for step in steps].index("USER") > last


@EACH
def test_environment_is_safe(target: str) -> None:
    found = environment(chain(STAGES, target))
    assert found["PYTHONSAFEPATH"] == "1"
    assert found["PROMETHEUS_DISABLE_CREATED_SERIES"] == "true"


@EACH
def test_working_directory_is_the_samples_one(target: str) -> None:
    assert values(chain(STAGES, target), "WORKDIR")[-1] == "/springtide"


@EACH
def test_labels_name_licence_and_version(target: str) -> None:
    text = " ".join(values(chain(STAGES, target), "LABEL"))
    assert 'org.opencontainers.image.licenses="Apache-2.0"' in text
    assert 'org.opencontainers.image.version="${VERSION}"' in text
    assert f"VERSION={names.PROGRAM_VERSION}" in values(chain(STAGES, target), "ARG")


@EACH
def test_package_index_is_an_argument_and_empty(target: str) -> None:
    arguments = values(chain(STAGES, target), "ARG")
    assert 'PIP_INDEX_URL=""' in arguments
    assert not re.search(r"https?://", TEXT)


@EACH
def test_code_comes_after_dependencies(target: str) -> None:
    steps = [step for step in chain(STAGES, target) if step.word in {"RUN", "COPY"}]
    install = next(
        index for index, step in enumerate(steps) if "-r /opt/springtide/requirements.txt" in step.rest
    )
    code = [
        index
        for index, step in enumerate(steps)
        if "/wheels" in step.rest or step.rest.startswith("examples")
    ]
    assert code
    assert min(code) > install


def test_default_base_has_the_promised_python() -> None:
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+", ARGUMENTS["PYTHON_IMAGE"])


@EACH
def test_commands_exist(target: str) -> None:
    command = json.loads(values(chain(STAGES, target), "CMD")[-1])
    if command[:2] == ["python", "-m"]:
        module = command[2]
        assert any((ROOT / root / module / "__main__.py").is_file() for root in ("operator", "worker", "ps"))


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
    assert not [line for line in needs if line.startswith(("torch", "numpy", "kubernetes>"))]
