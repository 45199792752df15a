"""The comparison of rights at the end of the suite finds what is missing and what is too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chart_rights import used
from suite_rights import RUN_OPERATORS, SELDOM, USER, compare, rendered, requests_in, whole_suite


def test_what_clusters_left_is_read_together(tmp_path: Path) -> None:
    request = {"user": USER, "verb": "get", "group": "", "resource": "pods", "subresource": "", "count": 1}
    (tmp_path / "a.json").write_text(json.dumps({"requests": [request]}))
    (tmp_path / "b.json").write_text(
        json.dumps({"requests": [{**request, "verb": "delete"}, {**request, "user": "x", "verb": "patch"}]})
    )
    assert used(requests_in(tmp_path), USER) == {("get", "", "pods"), ("delete", "", "pods")}


def test_rendered_rules_hold_what_the_operator_needs() -> None:
    rights = rendered()
    assert {("create", "", "pods"), ("patch", "springtide.dev", "trainingjobs/status")} <= rights
    assert ("create", "networking.k8s.io", "networkpolicies") in rights
    assert not any(verb == "*" or resource == "*" for verb, _, resource in rights)


def test_missing_right_always_fails_and_an_excess_at_the_end() -> None:
    a, b, c = ("get", "", "pods"), ("list", "", "nodes"), ("patch", "apps", "deployments")
    assert compare({a, b}, {a, b}, whole=True) == []
    assert compare({a, c}, {a, b}, whole=False) == ["used without being granted: patch deployments.apps"]
    assert compare({a}, {a, b}, whole=False) == []
    assert compare({a}, {a, b}, whole=True) == ["granted without being used: list nodes"]
    assert compare({a}, {a, *SELDOM}, whole=True) == []
    assert set(SELDOM) <= rendered()


@pytest.mark.parametrize(
    ("files", "narrowed", "failed", "whole"),
    [
        (RUN_OPERATORS, False, False, True),
        (RUN_OPERATORS[:2], False, False, False),
        (RUN_OPERATORS, True, False, False),
        (RUN_OPERATORS, False, True, False),
    ],
)
def test_the_whole_suite_is_told_from_a_part(
    files: tuple[str, ...], narrowed: bool, failed: bool, whole: bool
) -> None:
    assert whole_suite([f"tests/any/{file}" for file in files], narrowed, failed) is whole
