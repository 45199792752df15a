"""A small writer of SVG charts: lanes over one time axis, with a mark at every event."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 1060, 78, 20, 88
LANE_HEIGHT, LANE_GAP = 130, 30
INK, GRID, MARK = "#1f2933", "#d9e0e6", "#b4540a"


@dataclass(frozen=True)
class Lane:
    """One curve: (seconds, value) in order of time. `steps`: a staircase; `log`: a logarithmic scale."""

    title: str
    points: Sequence[tuple[float, float]]
    colour: str
    steps: bool = False
    log: bool = False


@dataclass(frozen=True)
class Mark:
    at: float
    label: str


def render(title: str, lanes: Sequence[Lane], marks: Sequence[Mark]) -> str:
    """Return the picture as an SVG document.

    Args:
        title: its heading.
        lanes: from top to bottom; values that are not finite are left out.
        marks: of events, over all lanes; times in seconds from 0.
    """
    end = max([1.0, *(point[0] for lane in lanes for point in lane.points), *(mark.at for mark in marks)])
    height = TOP + len(lanes) * (LANE_HEIGHT + LANE_GAP) + 28
    bottom = TOP + len(lanes) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP

    def x_of(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * max(0.0, seconds) / end

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{INK}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for tick in ticks(0.0, end, 12):
        x = x_of(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g} s</text>')
    for index, lane in enumerate(lanes):
        parts += _lane(lane, TOP + index * (LANE_HEIGHT + LANE_GAP), x_of, end)
    for index, mark in enumerate(marks):
        x = x_of(mark.at)
        y = 44 + 13 * (index % 2)
        parts.append(
            f'<line x1="{x:.1f}" y1="{y + 3}" x2="{x:.1f}" y2="{bottom}" '
            f'stroke="{MARK}" stroke-dasharray="4 3"/>'
        )
        anchor = "end" if x > WIDTH - 110 else "start"
        parts.append(
            f'<text x="{x + (3 if anchor == "start" else -3):.1f}" y="{y + 2}" '
            f'fill="{MARK}" text-anchor="{anchor}">{escape(mark.label)}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers for an axis.

    Args:
        low: its lower end.
        high: its upper end.
        about: how many steps there should be; at most about one more than this many numbers come back.

    Returns:
        Ascending, in [low, high]; `low` alone for an empty axis.
    """
    if high <= low:
        return [low]
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _lane(lane: Lane, top: float, x_of: Callable[[float], float], end: float) -> list[str]:
    parts = [f'<text x="{LEFT}" y="{top - 6}" font-weight="600">{escape(lane.title)}</text>']
    points = [(t, v) for t, v in lane.points if math.isfinite(v) and (v > 0 or not lane.log)]
    scale = math.log10 if lane.log else float
    values = [scale(value) for _, value in points] or [0.0, 1.0]
    low = math.floor(min(values)) if lane.log else 0.0
    high = max(values)
    high = math.ceil(high) if lane.log else high * 1.08
    if high <= low:
        high = low + 1.0

    def y_of(value: float) -> float:
        return top + LANE_HEIGHT * (1 - (scale(value) - low) / (high - low))

    if lane.log:
        marks = [10.0**power for power in range(int(low), int(high) + 1)]
    elif lane.steps and high < 9:  # a staircase counts things: every whole number, as long as they are few
        marks = [float(value) for value in range(int(high) + 1)]
    else:
        marks = ticks(low, high, 4)
    for value in marks:
        y = y_of(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if points:
        path = [f"M{x_of(points[0][0]):.1f},{y_of(points[0][1]):.1f}"]
        for seconds, value in points[1:]:
            path.append(
                f"H{x_of(seconds):.1f}V{y_of(value):.1f}"
                if lane.steps
                else f"L{x_of(seconds):.1f},{y_of(value):.1f}"
            )
        if lane.steps:
            path.append(f"H{x_of(end):.1f}")
        parts.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{lane.colour}" '
            'stroke-width="1.8" stroke-linejoin="round"/>'
        )
    return parts
