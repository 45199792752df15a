"""The three curves of the picture, from the history."""

from __future__ import annotations

from collections.abc import Sequence

from springtide_demo.commits import Commit, History
from springtide_demo.scenario import Done
from springtide_demo.svg import Lane, Mark, render


def binned_rate(curve: Sequence[Commit], start: float, width: float) -> list[tuple[float, float]]:
    """Return samples per second over time; the last bin is left out, since it is not full.

    Args:
        curve: the surviving commits in order of their times.
        start: of the first bin, in unix seconds.
        width: of a bin, in seconds.

    Returns:
        (middle of the bin in seconds from `start`, samples/s) of each.
    """
    if not curve:
        return []
    counts = [0] * (int((curve[-1].unix_time - start) / width) + 1)
    for commit in curve:
        counts[max(0, int((commit.unix_time - start) / width))] += commit.samples
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts[:-1])]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Thin points out, so that the file stays small: each is the mean of its neighbours.

    Args:
        points: in order.
        most: about how many are to be left.
    """
    size = max(1, -(-len(points) // most))
    groups = [points[index : index + size] for index in range(0, len(points), size)]
    return [
        (sum(p[0] for p in group) / len(group), sum(p[1] for p in group) / len(group)) for group in groups
    ]


def workers(history: History, start: float) -> list[tuple[float, float]]:
    """Return the members of each generation that survives in the history.

    Args:
        history: of all commits.
        start: of time, in unix seconds.

    Returns:
        (first commit of the generation in seconds from `start`, members) of each.
    """
    surviving = sorted({commit.generation for commit in history.curve()})
    return [(history.first_commit[g] - start, float(len(history.members[g]))) for g in surviving]


def picture(history: History, done: Sequence[Done], name: str) -> str:
    """Return the timeline of a run as SVG. Seconds count from the first commit.

    Args:
        history: of all commits.
        done: the events, which are marked.
        name: of the job, for the title.
    """
    curve = history.curve()
    start = curve[0].unix_time if curve else 0.0
    losses = [(commit.unix_time - start, commit.loss) for commit in curve if commit.loss is not None]
    lanes = [
        Lane("workers", workers(history, start), "#205493", steps=True),
        Lane("samples per second", binned_rate(curve, start, 0.5), "#2e8540"),
        Lane("training loss (global batch, logarithmic)", thinned(losses, 1200), "#8c2f39", log=True),
    ]
    return render(
        f"{name}: one training, six disturbances",
        lanes,
        [Mark(event.at - start, event.kind) for event in done],
    )
