"""Prometheus beside the demo: what it scrapes, what it is asked, and what happens where it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from chart_render import ROOT

from springtide_demo import prometheus
from springtide_demo.prometheus import PrometheusError, beside, configuration, panels, points
from springtide_demo.scrape_targets import targets

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
"""
BOARD = ROOT / "deploy" / "grafana" / "springtide.json"


def test_every_panel_is_asked_with_its_variables_filled_in() -> None:
    found = panels(json.loads(BOARD.read_text()))
    assert "Step time" in found
    assert all(queries for queries in found.values())
    assert not [query for queries in found.values() for query in queries if "$" in query]


def test_points_count_over_all_series() -> None:
    series = [{"values": [[1, "1"], [2, "2"]]}, {"values": [[1, "1"]]}]
    assert points({"data": {"result": series}}) == 3
    assert points({"data": {"result": []}}) == 0


def test_configuration_is_yaml_and_keeps_labels(tmp_path: Path) -> None:
    written = yaml.safe_load(yaml.safe_dump(configuration(tmp_path / "targets.json")))
    scrape = written["scrape_configs"][0]
    assert scrape["honor_labels"] is True
    assert scrape["file_sd_configs"][0]["files"] == [str(tmp_path / "targets.json")]


def test_targets_are_metrics_ports_of_running_pods() -> None:
    ports = [{"name": "grpc", "containerPort": 7070}, {"name": "metrics", "containerPort": 9401}]
    spec = {"containers": [{"ports": ports}, {}]}
    meta = {"name": "p", "namespace": "n"}
    running = {"metadata": meta, "spec": spec, "status": {"phase": "Running", "podIP": "127.0.0.9"}}
    others = [
        {**running, "status": {"phase": "Running"}},
        {**running, "status": {"phase": "Failed", "podIP": "x"}},
    ]
    assert targets([running, *others]) == [
        {"targets": ["127.0.0.9:9401"], "labels": {"pod": "p", "namespace": "n"}}
    ]


def test_without_prometheus_a_line_says_so_and_the_demo_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    with beside(tmp_path / "kubeconfig", BOARD, tmp_path, lambda text, style: said.append(text)):
        said.append("inside")
    assert "apt-get install prometheus" in said[0]
    assert said[1:] == ["inside"]
    assert not (tmp_path / "metrics.json").exists()


def test_a_prometheus_that_ends_at_once_is_told_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    program = tmp_path / "bin" / "prometheus"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho bad flag >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(prometheus, "READY_SECONDS", 5.0)
    with (
        pytest.raises(PrometheusError, match="bad flag"),
        beside(kubeconfig, BOARD, tmp_path, lambda text, style: None),
    ):
        pytest.fail("the demo must not begin")
