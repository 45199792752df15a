"""Dashboard and alert rules ask for metrics and labels that exist, and the rules fire as they should."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from chart_metrics import coordinator_series, names_in, operator_series, server_series, worker_series
from chart_render import ROOT

from deploy.grafana import dashboard

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
_BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_MATCHER = re.compile(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    jobs = worker_series() | server_series() | coordinator_series(tmp_path_factory.mktemp("state"))
    return operator_series() | jobs


# Each says more elsewhere on the dashboard.
NOT_DRAWN = {
    "springtide_job_generation": "coordinator_generation is fresher",
    "springtide_job_goodput_ratio": "coordinator_goodput_ratio is fresher",
    "springtide_job_lost_seconds_total": "coordinator_lost_seconds_total is fresher",
    "springtide_job_estimated_completion_timestamp_seconds": "a time; kubectl and the command line show it",
    "springtide_job_progress_ratio": "one number, which kubectl and the command line show",
    "springtide_job_recoveries_total": "coordinator_recoveries_total has the cause",
    "springtide_job_samples_per_second": "coordinator_samples_per_second is fresher",
    "springtide_job_samples_total": "samples per second are drawn",
    "springtide_job_step": "coordinator_step is fresher",
    "springtide_coordinator_samples_total": "samples per second are drawn",
    "springtide_coordinator_standbys": "those that are ready, of the operator, are drawn",
    "springtide_worker_coordinator_missing_seconds": "the operator asks for it while a coordinator is silent",
    "springtide_worker_since_commit_seconds": "the operator asks for it while a coordinator is silent",
    "springtide_worker_samples_total": "one worker's part of the samples per second",
    "springtide_worker_steps_total": "all workers commit the same steps",
}
_ENDINGS = re.compile(r"_(bucket|count|sum|created)$")


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def asked() -> dict[str, list[str]]:
    """{who asks: its queries}."""
    return dashboard.queries(dashboard.dashboard()) | {rule["alert"]: [rule["expr"]] for rule in rules()}


def test_every_metric_that_is_asked_for_is_served(served: dict[str, set[str]]) -> None:
    missing = {who: names_in(queries) - set(served) for who, queries in asked().items()}
    assert {who: names for who, names in missing.items() if names} == {}


def test_every_metric_is_drawn_or_asked_for_or_said_elsewhere(served: dict[str, set[str]]) -> None:
    used = {_ENDINGS.sub("", name) for name in names_in([q for queries in asked().values() for q in queries])}
    known = {_ENDINGS.sub("", name) for name in served}
    assert known - used == set(NOT_DRAWN)


def test_every_label_that_is_asked_for_is_served(served: dict[str, set[str]]) -> None:
    for who, queries in asked().items():
        for query in queries:
            labels = {label.strip() for group in _BY.findall(query) for label in group.split(",")}
            labels |= set(_MATCHER.findall(query))
            known = {"le"}.union(*(served[name] for name in names_in([query])))
            assert labels <= known, f"{who}: {sorted(labels - known)} in {query}"


def test_every_panel_has_a_query_and_a_title_of_its_own() -> None:
    board = dashboard.dashboard()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_panels_do_not_overlap_and_fill_the_width() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= dashboard.WIDTH
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    lines = {y for _, y in taken}
    assert lines == set(range(max(lines) + 1))
    assert len(taken) == dashboard.WIDTH * len(lines)


def test_dashboard_file_is_the_module_s() -> None:
    text = (ROOT / "deploy" / "grafana" / "springtide.json").read_text()
    assert text == dashboard.to_json(), "run: python charts/generate.py"
    assert json.loads(text)["uid"] == "springtide"


@pytest.mark.slow
def test_rules_pass_promtool_and_each_is_tested(require_tool: Callable[[str], str]) -> None:
    promtool, folder = require_tool("promtool"), ALERTS.parent
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((folder / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_queries_are_promql(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """promtool parses each query of the dashboard as a recording rule, its variables filled in."""
    filled = [
        query.replace("$__rate_interval", "1m")
        for who, queries in dashboard.queries(dashboard.dashboard()).items()
        for query in queries
        if not who.startswith("variable ")
    ]
    records = [{"record": f"panel:{number}:query", "expr": query} for number, query in enumerate(filled)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    done = subprocess.run(
        [require_tool("promtool"), "check", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
