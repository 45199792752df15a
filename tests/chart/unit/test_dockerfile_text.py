"""Facts about the Dockerfile that need no build."""

from __future__ import annotations

import json
import re

import pytest
from chart_dockerfile import chain, environment, parse, values
from chart_render import ROOT

from deploy.requirements import IMAGES
from springtide_operator.api import names

TEXT = (ROOT / "Dockerfile").read_text()
ARGUMENTS, STAGES = parse(TEXT)
TARGETS = sorted(IMAGES)
EACH = pytest.mark.parametrize("target", TARGETS)


def test_targets_are_the_images() -> None:
    assert set(STAGES) == {"wheel", "slim", "torch", "worker-base", "worker-plain", *IMAGES}


def test_bases_are_stages_or_named_by_digest() -> None:
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base in {"${PYTHON_IMAGE}", "${BASE}"}
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+@sha256:[0-9a-f]{64}", ARGUMENTS["PYTHON_IMAGE"])
    assert ARGUMENTS["BASE"] == "${PYTHON_IMAGE}"
    # Nor is another's parser of this file fetched by a tag.
    assert "syntax=" not in TEXT


@pytest.mark.parametrize("target", sorted(STAGES))
def test_each_pip_takes_hashed_wheels_or_no_index(target: str) -> None:
    commands = [
        command
        for step in STAGES[target].steps
        if step.word == "RUN"
        for command in re.split(r"&&|;|\|\|", step.rest)
        if "pip " in command
    ]
    for command in commands:
        hashed = "--require-hashes" in command and "--only-binary :all:" in command and "--no-deps" in command
        assert hashed or "--no-index" in command, command
    assert bool(commands) == (target != "slim")


def test_no_second_index_can_be_named() -> None:
    assert "EXTRA_INDEX" not in TEXT


@pytest.mark.parametrize("target", ["worker-plain", "ps", "operator"])
def test_examples_and_what_they_need_are_left_out(target: str) -> None:
    for step in chain(STAGES, target):
        assert "scikit" not in step.rest
        assert "-r /opt/springtide/examples.txt" not in step.rest
        assert not (step.word == "COPY" and step.rest.startswith("examples"))


def test_workers_examples_are_the_last_layers() -> None:
    rest = [step.rest for step in STAGES["worker"].steps if step.word in {"RUN", "COPY"}]
    assert "-r /opt/springtide/examples.txt" in rest[0]
    assert rest[1] == "examples examples"
    assert STAGES["worker"].base == STAGES["worker-plain"].base == "worker-base"


@pytest.mark.parametrize("target", [*TARGETS, "worker-plain"])
def test_image_says_what_it_holds(target: str) -> None:
    steps = [step.rest for step in chain(STAGES, target) if step.word == "RUN"]
    assert f"sbom.py image {target} " in steps[-1]
    # Nothing is installed after the bill was written.
    assert not [step for step in steps[:-1] if "sbom.py image" in step]


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
    names_of_locks = ("requirements.txt", f"{target}.txt")
    install = next(
        index
        for index, step in enumerate(steps)
        if any(f"-r /opt/springtide/{name}" in step.rest for name in names_of_locks)
    )
    code = [
        index
        for index, step in enumerate(steps)
        if "/wheels" in step.rest or step.rest.startswith("examples")
    ]
    assert code
    assert min(code) > install


@EACH
def test_commands_exist(target: str) -> None:
    command = json.loads(values(chain(STAGES, target), "CMD")[-1])
    if command[:2] == ["python", "-m"]:
        module = command[2]
        assert any((ROOT / root / module / "__main__.py").is_file() for root in ("operator", "worker", "ps"))
