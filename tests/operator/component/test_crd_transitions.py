"""Fields that cannot be edited cannot be removed and added again either; by kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_api import Api, Kubectl
from operator_world import job_object

from springtide_operator.api.crd import custom_resource_definition

pytest_plugins = ["local_api_fixtures"]


@pytest.fixture
def namespace(api: Api, tmp_path: Path) -> Any:
    crd = tmp_path / "crd.yaml"
    crd.write_text(yaml.safe_dump(custom_resource_definition()))
    api.do("apply", "--server-side", "-f", str(crd))
    api.do("wait", "--for=condition=Established", "-f", str(crd), "--timeout=30s")
    with api.namespace() as name:
        yield name


def edit(api: Api, namespace: str, spec: dict[str, Any]) -> Kubectl:
    body = json.dumps({"spec": spec})
    return api.kubectl("-n", namespace, "patch", "stj", "digits", "--type=merge", "-p", body)


def test_checkpoint_of_a_job_comes_once_and_stays(api: Api, namespace: str) -> None:
    job = job_object(1)
    job["metadata"] = {"name": "digits", "namespace": namespace}
    api.do("apply", "-f", "-", stdin=json.dumps(job))
    assert edit(api, namespace, {"checkpoint": {"uri": "/volume"}}).code == 0
    assert edit(api, namespace, {"checkpoint": {"keep": 5}}).code == 0
    other = edit(api, namespace, {"checkpoint": {"uri": "/other"}})
    assert "checkpoint.uri is immutable" in other.err
    gone = edit(api, namespace, {"checkpoint": None})
    assert gone.code != 0
    assert "checkpoint cannot be removed" in gone.err
    uri = api.do("-n", namespace, "get", "stj", "digits", "-o", "jsonpath={.spec.checkpoint.uri}")
    assert uri == "/volume"
