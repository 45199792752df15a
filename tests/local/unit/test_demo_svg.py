from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from demo_histories import FIRST, SECOND, steady
from hypothesis import given
from hypothesis import strategies as st

from springtide_demo.commits import History
from springtide_demo.scenario import Done
from springtide_demo.svg import Lane, Mark, render, ticks
from springtide_demo.timeline import binned_rate, picture, thinned, workers

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_its_lanes_and_marks_and_is_well_formed() -> None:
    text = render(
        "a <b> & c", [Lane("workers", [(0, 3), (5, 5)], "#123456", steps=True)], [Mark(2.0, "scale-up")]
    )
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a <b> & c", "workers", "scale-up"} <= set(words)
    path = next(element for element in root.iter(f"{SVG}path") if element.get("stroke") == "#123456")
    assert "H" in path.get("d", "")


def test_staircase_reaches_end_and_higher_values_stand_higher() -> None:
    root = ElementTree.fromstring(
        render("t", [Lane("w", [(0, 2), (4, 4)], "#1", steps=True)], [Mark(10.0, "end")])
    )
    path = next(root.iter(f"{SVG}path")).get("d", "")
    first_y, second_y = float(path.split(",")[1].split("H")[0]), float(path.split("V")[1].split("H")[0])
    assert second_y < first_y
    assert path.endswith("H1040.0")


@pytest.mark.parametrize("log", [False, True])
def test_nothing_to_draw_is_no_error(log: bool) -> None:
    text = render("t", [Lane("empty", [(0.0, math.nan), (1.0, -math.inf)], "#1", log=log)], [])
    assert "nan" not in text
    assert "inf" not in text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 20))
def test_ticks_are_round_and_inside(low: float, size: float, about: int) -> None:
    found = ticks(low, low + size, about)
    assert len(found) <= about + 2
    assert all(low - size * 1e-6 <= tick <= low + size * (1 + 1e-6) for tick in found)


def test_the_rate_counts_whole_bins() -> None:
    assert binned_rate(steady(1, 101, 0.0), 0.0, 0.5) == [(0.25, 6400.0), (0.75, 6400.0)]
    assert binned_rate([], 0.0, 0.5) == []


def test_thinning_keeps_few_points_and_the_mean() -> None:
    points = [(float(i), float(i)) for i in range(1000)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert few[0] == (4.5, 4.5)
    assert thinned(points[:5], 100) == points[:5]


def test_the_picture_shows_the_workers_of_each_generation() -> None:
    history = History()
    history.add(
        steady(1, 100, 50.0, FIRST, pod="a")
        + steady(1, 100, 50.0, FIRST, pod="b")
        + steady(101, 200, 52.0, SECOND, pod="a")
    )
    assert workers(history, 50.0) == [(0.0, 2.0), (2.0, 1.0)]
    text = picture(history, [Done("kill-worker", 51.5)], "digits")
    assert "kill-worker" in text
    assert "digits: one training, six disturbances" in text
