"""Pictures of the dashboard: those in docs/pictures/ follow from what a run measured, and are drawn right."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from docs.site.panels import Panel, Series, compact, legend, picture, rows, shown
from docs.site.pictures import ROWS, drawn
from springtide_demo.svg import Mark

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs/pictures"
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/springtide.json").read_text())
SVG = "{http://www.w3.org/2000/svg}"


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PICTURES / "dashboard.json").read_text())
    return found


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_pictures_are_those_of_the_run_and_the_dashboard() -> None:
    made = drawn(data(), BOARD)
    assert {path.name for path in PICTURES.glob("*.svg")} == set(made)
    again = "python -m docs.site.pictures draw, or make pictures after a change of a row's panels"
    assert [name for name, text in made.items() if (PICTURES / name).read_text() != text] == [], again


def test_run_has_a_kill_a_scale_up_and_points_in_most_panels() -> None:
    kept = data()
    assert {"kill-worker", "scale-up"} <= {event["kind"] for event in kept["events"]}
    assert all(0 < event["at"] < kept["seconds"] for event in kept["events"])
    titles = [panel["title"] for row in ROWS for panel in rows(BOARD)[row]]
    filled = [title for title in titles if kept["panels"].get(title)]
    assert len(filled) > 0.8 * len(titles)
    workers = {
        line["name"]: [value for _, value in line["points"]]
        for line in kept["panels"]["Workers wanted, there, training"]
    }
    (training,) = (values for name, values in workers.items() if name.endswith(" ready"))
    assert max(training) == 5


def test_page_shows_every_picture_with_its_date() -> None:
    page = (ROOT / "docs/dashboard.md").read_text()
    assert sorted(re.findall(r"!\[[^\]]+\]\(pictures/([^)]+)\)", page)) == sorted(
        path.name for path in PICTURES.glob("*.svg")
    )
    assert data()["date"] in page
    for title in ROWS:
        assert f"## {title}\n" in page


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25 %"),
        (0.05, "s", "50 ms"),
        (0, "s", "0 s"),
        (90, "s", "90 s"),
        (1500, "short", "1.5K"),
        (12, "short", "12"),
        (2048, "bytes", "2 KiB"),
        (3 * 1024**2, "Bps", "3 MiB/s"),
        (0.5, "ops", "0.5 /s"),
    ],
)
def test_values_are_written_in_their_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_legend_is_made_of_labels() -> None:
    assert legend("{{a}}/{{b}} p50 {{lost}}", {"a": "x", "b": "y"}) == "x/y p50 "


def test_only_corners_of_finite_points_are_kept() -> None:
    panel = {
        "type": "timeseries",
        "title": "P",
        "targets": [{"legendFormat": "{{job}}"}, {"legendFormat": "other"}],
    }
    board = {"panels": [{"type": "row", "title": "R"}, panel]}
    values = [[100, "1"], [101, "1"], [102, "1"], [103, "NaN"], [104, "2.000049"], [105, "1"]]
    answer = [{"metric": {"job": "digits"}, "values": values}]
    found = compact(board, {"from": 99.0, "panels": {"P": [answer, []]}}, ["R"])
    points = [[1.0, 1.0], [3.0, 1.0], [5.0, 2.0], [6.0, 1.0]]
    assert found == {"P": [{"name": "digits", "points": points}]}


def test_picture_has_panels_lines_and_events_in_their_places() -> None:
    line = Series("a <job>", ((0.0, 0.0), (5.0, 10.0), (10.0, 5.0)))
    panels = [
        Panel("Steps & more", "short", True, 12, (line,)),
        Panel("Empty", "s", False, 12, ()),
        Panel("Below", "s", False, 8, (line, line)),
    ]
    svg = picture("Row", panels, [Mark(5.0, "kill-worker")], 10.0)
    tree = ElementTree.fromstring(svg)
    assert {"Row", "Steps & more", "Empty", "No data", "Below", "a <job>", "1: kill-worker (5 s)"} <= set(
        texts(svg)
    )
    paths = [path.get("d") or "" for path in tree.iter(f"{SVG}path")]
    assert len(paths) == 3
    assert "H" in paths[0]
    assert "H" not in paths[1]
    frames = [
        (float(box.get("x", "0")), float(box.get("y", "0")), float(box.get("width", "0")))
        for box in tree.iter(f"{SVG}rect")
        if box.get("rx")
    ]
    (first, second, third) = frames
    assert first[1] == second[1] < third[1]
    assert first[0] + first[2] < second[0]
    assert third[2] < first[2]
    # A higher value is further up, and the event lies where its time is.
    x_of, y_of = zip(
        *(map(float, pair.split(",")) for pair in re.findall(r"[\d.]+,[\d.]+", paths[1])), strict=True
    )
    assert y_of[1] < y_of[2] < y_of[0]
    assert x_of[0] < x_of[1] < x_of[2]
    marks = [line for line in tree.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    assert len(marks) == 3
