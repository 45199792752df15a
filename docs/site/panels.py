"""Draw panels of the Grafana dashboard as SVG, from answers of Prometheus: pictures without a Grafana."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from springtide_demo.svg import Mark, ticks

WIDTH, GAP, HEADING = 1200, 10, 34
PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 250, 58, 14, 40, 28
LEGEND_LINE, LEGEND_LETTER = 16, 6.3
COLOURS = ("#2f6fb3", "#c7760a", "#3c8d40", "#b3313f", "#7d52a8", "#4a8f94", "#8a6a3b", "#5d6b7a")
INK, SOFT, GRID, FRAME, MARK = "#1f2933", "#52606d", "#e4e9ee", "#cbd3db", "#b4540a"
_LABEL = re.compile(r"\{\{(\w+)\}\}")
_PLACES = 4  # significant digits of a value


@dataclass(frozen=True)
class Series:
    """One line of a panel: its name in the legend, and (seconds, value) in order of time."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """A panel and what it shows.

    Attributes:
        title: above it.
        unit: of its values, in Grafana's names.
        steps: lines go in steps.
        columns: how much of Grafana's 24 columns it takes.
        series: its lines; none: "No data", as Grafana says.
    """

    title: str
    unit: str
    steps: bool
    columns: int
    series: tuple[Series, ...]


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Return a line's name, as Grafana makes it.

    Args:
        template: with `{{label}}`.
        labels: of the series.
    """
    return _LABEL.sub(lambda found: labels.get(found[1], ""), template)


def shown(value: float, unit: str) -> str:
    """Return a value as an axis says it.

    Args:
        value: a number.
        unit: in Grafana's names: short, s, ops, Bps, bytes, percentunit.
    """
    if unit == "percentunit":
        return f"{100 * value:g} %"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or value == 0 else f"{1000 * value:g} ms"
    size, names = (
        (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit in ("bytes", "Bps") else (1000, ("", "K", "M", "G"))
    )
    index = 0
    while abs(value) >= size and index < len(names) - 1:
        value, index = value / size, index + 1
    ending = {"bytes": "B", "Bps": "B/s", "ops": "/s"}.get(unit, "")
    number = f"{value:.4g}"
    return f"{number} {names[index]}{ending}".strip() if ending else f"{number}{names[index]}"


def rows(board: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return {title of a row of a dashboard: its panels, as in its JSON}."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in board["panels"]:
        if panel["type"] == "row":
            found[panel["title"]] = []
        else:
            list(found.values())[-1].append(panel)
    return found


def compact(board: Mapping[str, Any], answers: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return what pictures need of a run: {panel: its lines, with seconds since the beginning}.

    Args:
        board: the dashboard's JSON.
        answers: panels.json of a demo with Prometheus.
        wanted: titles of the rows.

    Returns:
        For each panel its series in the order of queries: [{name, points: [[seconds, value], ...]}]. Points
        in the middle of a flat stretch are left out.
    """
    begin = float(answers["from"])
    found = {}
    for title in wanted:
        for panel in rows(board)[title]:
            lines = []
            for target, result in zip(panel["targets"], answers["panels"][panel["title"]], strict=True):
                for series in result:
                    values = [(float(at) - begin, float(value)) for at, value in series["values"]]
                    points = [(round(at, 1), _rounded(value)) for at, value in values if math.isfinite(value)]
                    if points:
                        name = legend(target["legendFormat"], series["metric"])
                        lines.append({"name": name, "points": [list(point) for point in _corners(points)]})
            found[panel["title"]] = lines
    return found


def panel_of(board_panel: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Panel:
    """Return a panel with its lines.

    Args:
        board_panel: as in the dashboard's JSON.
        lines: as `compact` gives them.
    """
    defaults = board_panel["fieldConfig"]["defaults"]
    return Panel(
        board_panel["title"],
        defaults["unit"],
        defaults["custom"]["lineInterpolation"] == "stepAfter",
        board_panel["gridPos"]["w"],
        tuple(Series(line["name"], tuple((at, value) for at, value in line["points"])) for line in lines),
    )


def picture(title: str, panels: Sequence[Panel], marks: Sequence[Mark], seconds: float) -> str:
    """Return a row of the dashboard as an SVG document.

    Args:
        title: of the row.
        panels: in order; they are laid out on 24 columns as Grafana does.
        marks: events, which every panel has as a dashed line and the heading by name.
        seconds: the end of the time axis, which begins at 0.
    """
    places, column, line = [], 0, 0
    for panel in panels:
        if column + panel.columns > 24:
            column, line = 0, line + 1
        places.append((column, line))
        column += panel.columns
    named = "   ".join(
        f"{index}: {mark.label} ({mark.at:.0f} s)" for index, mark in enumerate(marks, start=1)
    )
    heights = [
        max(_height(panel) for panel, place in zip(panels, places, strict=True) if place[1] == number)
        for number in range(line + 1)
    ]
    tops = [HEADING + 22 + sum(heights[:number]) + GAP * number for number in range(line + 1)]
    height = tops[-1] + heights[-1] + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{INK}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#f4f6f8"/>',
        f'<text x="{GAP}" y="24" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="{GAP}" y="{HEADING + 10}" fill="{MARK}">{escape(named)}</text>',
    ]
    for panel, (column, number) in zip(panels, places, strict=True):
        x = GAP + (WIDTH - GAP) * column / 24
        parts += _panel(panel, (x, tops[number], _width(panel), heights[number]), marks, seconds)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _width(panel: Panel) -> float:
    return (WIDTH - GAP) * panel.columns / 24 - GAP


def _height(panel: Panel) -> int:
    lines = _legend(panel)[-1][2] + 1 if panel.series else 1
    return PANEL_HEIGHT + LEGEND_LINE * lines


def _legend(panel: Panel) -> list[tuple[str, float, int]]:
    """Return (name, place from the left, line) of each series: as many in a line as there is room for."""
    room, x, line = _width(panel) - 24, 0.0, 0
    found = []
    for series in panel.series:
        letters = int((room - 24) / LEGEND_LETTER)
        name = series.name if len(series.name) <= letters else series.name[: letters - 1] + "…"
        needed = 20 + LEGEND_LETTER * len(name) + 12
        if x > 0 and x + needed - 12 > room:
            x, line = 0.0, line + 1
        found.append((name, x, line))
        x += needed
    return found


def _panel(
    panel: Panel, box: tuple[float, float, float, float], marks: Sequence[Mark], seconds: float
) -> list[str]:
    left, top, width, height = box
    x0, x1 = left + LEFT, left + width - RIGHT
    y0, y1 = top + TOP, top + PANEL_HEIGHT - BOTTOM
    values = [value for series in panel.series for _, value in series.points]
    highest = max(values, default=1.0) or 1.0
    scale = ticks(0.0, highest * 1.25, 4)
    high = scale[-1] if scale[-1] >= highest else scale[-1] + scale[1]

    def x_of(at: float) -> float:
        return x0 + (x1 - x0) * min(max(at, 0.0), seconds) / seconds

    def y_of(value: float) -> float:
        return y1 - (y1 - y0) * value / high

    parts = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="3" fill="#ffffff" '
        f'stroke="{FRAME}"/>',
        f'<text x="{left + 12:.1f}" y="{top + 22:.1f}" font-weight="600">{escape(panel.title)}</text>',
    ]
    for number in scale:
        if number <= high:
            y = y_of(number)
            parts.append(f'<line x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
            parts.append(
                f'<text x="{x0 - 6:.1f}" y="{y + 4:.1f}" text-anchor="end" font-size="11" fill="{SOFT}">'
                f"{escape(shown(number, panel.unit))}</text>"
            )
    for number in ticks(0.0, seconds, 5):
        minutes, rest = divmod(round(number), 60)
        parts.append(
            f'<text x="{x_of(number):.1f}" y="{y1 + 16:.1f}" text-anchor="middle" font-size="11" '
            f'fill="{SOFT}">{minutes}:{rest:02d}</text>'
        )
    for index, mark in enumerate(marks, start=1):
        x = x_of(mark.at)
        parts.append(
            f'<line x1="{x:.1f}" y1="{y0:.1f}" x2="{x:.1f}" y2="{y1:.1f}" stroke="{MARK}" '
            f'stroke-dasharray="3 3" opacity="0.6"/>'
            f'<text x="{x:.1f}" y="{y0 - 3:.1f}" text-anchor="middle" font-size="10" '
            f'fill="{MARK}">{index}</text>'
        )
    if not panel.series:
        parts.append(
            f'<text x="{(x0 + x1) / 2:.1f}" y="{(y0 + y1) / 2:.1f}" text-anchor="middle" fill="{SOFT}">'
            "No data</text>"
        )
    for index, (series, (name, x, line)) in enumerate(zip(panel.series, _legend(panel), strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        path = _path([(x_of(at), y_of(value)) for at, value in series.points], panel.steps)
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.7" stroke-linejoin="round"/>'
        )
        x, y = left + 12 + x, top + PANEL_HEIGHT + LEGEND_LINE * line + 4
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 5:.1f}" width="14" height="3" fill="{colour}"/>'
            f'<text x="{x + 20:.1f}" y="{y:.1f}" font-size="11" fill="{SOFT}">{escape(name)}</text>'
        )
    return parts


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    parts = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for x, y in points[1:]:
        parts.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f},{y:.1f}")
    return "".join(parts)


def _rounded(value: float) -> float:
    return float(f"{value:.{_PLACES}g}")


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out points whose neighbours have the same value: the line is the same without them."""
    return [
        point
        for index, point in enumerate(points)
        if index in (0, len(points) - 1) or not points[index - 1][1] == point[1] == points[index + 1][1]
    ]
