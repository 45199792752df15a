"""Names in the documents about installing: they exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_render import CHART, ROOT, render
from chart_rights import granted

DOCS = [ROOT / "docs" / name for name in ("install.md", "security.md", "unverified.md", "values.md")]
EACH = pytest.mark.parametrize("doc", DOCS, ids=[doc.stem for doc in DOCS])
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_PATH = re.compile(r"(?<![\w/.-])((?:deploy|charts|docs|examples|operator)/[\w./-]+\w)")
_SET = re.compile(r"--set(?:-string)? '?([A-Za-z.]+)=")
_VALUE = re.compile(r"`((?:image|crds|metrics|helmTest|rbac|networkPolicy|serviceAccount)\.[A-Za-z.]+)`")


@EACH
def test_links_and_paths_exist(doc: Path) -> None:
    text = doc.read_text()
    for link in _LINK.findall(text):
        assert (doc.parent / link).resolve().exists(), link
    for path in _PATH.findall(text):
        assert (ROOT / path).exists(), path


@EACH
def test_values_exist(doc: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = doc.read_text()
    for path in {*_SET.findall(text), *_VALUE.findall(text)}:
        found: Any = values
        for key in path.split("."):
            assert isinstance(found, dict), path
            assert key in found, path
            found = found[key]


def test_build_arguments_exist() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    table = text.partition("| build argument")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert named == set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))


def test_every_right_is_explained() -> None:
    """The table of rights names each (verb, resource) that the chart grants, and none besides."""
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("| right | why |")[2].partition("\n\n")[0]
    told = {
        (verb.strip(), resource)
        for verbs, resource in re.findall(r"^\| ([a-z, ]+) `([a-z/]+)` \|", table, re.MULTILINE)
        for verb in verbs.split(",")
    }
    own = {("get", "secrets"), ("create", "leases"), ("get", "leases"), ("update", "leases")}
    rights = {(verb, resource) for verb, _, resource in granted(render(), "springtide-operator")}
    assert told == rights - own
    sentence = " ".join(text.partition("In its own namespace:")[2].partition("\n\n")[0].split())
    assert "create Secrets and Leases" in sentence
    assert "get the Secret `springtide-root-key`" in sentence
    assert "get and update the Lease `springtide-operator`" in sentence


def test_policy_in_the_security_page_is_valid() -> None:
    from chart_render import KUBERNETES_VERSIONS, schema_errors

    text = (ROOT / "docs" / "security.md").read_text()
    policy = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    for version in KUBERNETES_VERSIONS:
        assert schema_errors(policy, version) == []


def test_schema_is_json_that_editors_read() -> None:
    assert json.loads((CHART / "values.schema.json").read_text())["$schema"].startswith(
        "http://json-schema.org/draft-07"
    )
