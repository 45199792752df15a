"""The Grafana dashboard as code; `python charts/generate.py` writes it to deploy/grafana/springtide.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deploy.grafana.panels import Panel, Row
from deploy.grafana.rows import ROWS

UID = "springtide"
WIDTH = 24  # columns of Grafana's grid
HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": UID,
        "title": "Springtide",
        "description": "Elastic training jobs: what they do, what disturbed them, and what it cost.",
        "tags": ["springtide", "training"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels(ROWS)),
    }


def queries(board: dict[str, Any]) -> dict[str, list[str]]:
    """{panel's title: its PromQL}, variables' queries under `variable NAME`."""
    result = {p["title"]: [t["expr"] for t in p["targets"]] for p in board["panels"] if p["type"] != "row"}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            result[f"variable {variable['name']}"] = [variable["query"]["query"]]
    return result


def to_json() -> str:
    """The text of springtide.json."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    for name, label, query in (
        ("namespace", "Namespace", "label_values(springtide_job_workers, job_namespace)"),
        (
            "training_job",
            "Job",
            'label_values(springtide_job_workers{job_namespace=~"$namespace"}, training_job)',
        ),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        columns = 2 if len(row.panels) in (2, 4) else min(3, len(row.panels))
        width = WIDTH // columns
        for index, panel in enumerate(row.panels):
            number += 1
            line, column = divmod(index, columns)
            place = {"h": HEIGHT, "w": width, "x": column * width, "y": y + line * HEIGHT}
            yield _panel(number, panel, place)
        y += HEIGHT * -(-len(row.panels) // columns)


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {
        "fillOpacity": 10,
        "showPoints": "never",
        "lineInterpolation": "stepAfter" if panel.marks else "linear",
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
