"""docs/operations.md names everything that is served: metrics, conditions, events, alerts, causes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from chart_metrics import coordinator_series, operator_series, server_series, worker_series

from springtide_coordinator.history import LOST_CAUSES
from springtide_operator.api import reasons

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/operations.md").read_text()
CODE = set(re.findall(r"`([A-Za-z_]+)`", TEXT))
_ENDINGS = re.compile(r"_(bucket|count|sum|created)$")


def test_every_metric_is_explained_and_no_other(tmp_path: Path) -> None:
    served = {*operator_series(), *coordinator_series(tmp_path), *worker_series(), *server_series()}
    served = {_ENDINGS.sub("", name) for name in served if not name.endswith("_created")}
    named = {name for name in CODE if name.startswith("springtide_")}
    assert named == served


def test_every_condition_and_event_is_explained() -> None:
    types = {reasons.RUNNING, reasons.RESCALING, reasons.DEGRADED, reasons.SUSPENDED}
    types |= {reasons.SUCCEEDED, reasons.FAILED}
    posted = (ROOT / "operator/springtide_operator/plan").glob("*.py")
    source = "".join(path.read_text() for path in posted)
    events = {
        str(value)
        for name, value in vars(reasons).items()
        if name.startswith("EVENT_") and f"reasons.{name}" in source
    }
    assert len(events) >= 5
    assert (types | events) - CODE == set()


def test_every_reason_and_state_is_explained() -> None:
    pages = [TEXT, *((ROOT / "docs" / name).read_text() for name in ("troubleshooting.md", "life.md"))]
    explained = {word for page in pages for word in re.findall(r"`([A-Za-z]+)`", page)}
    constants = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert len(constants) > 60
    assert constants - explained == set()


def test_every_alert_and_cause_is_explained() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert {name for name in CODE if re.fullmatch(r"Springtide[A-Z]\w+", name)} == alerts
    assert set(LOST_CAUSES) <= CODE
