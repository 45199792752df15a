"""The three curves of the picture, from the history."""

from __future__ import annotations

from collections.abc import Sequence

from springtide_demo.commits import Commit, History
from springtide_demo.scenario import Done
from springtide_demo.svg import Lane, Mark, render


def binned_rate(curve: Sequence[Commit], start: float, width: float) -> list[tuple[float, float]]:
    """Return (middle of the bin, samples/s) over bins of `width` seconds, the last part bin left out."""
    if not curve:
        return []
    counts = [0] * (int((curve[-1].unix_time - start) / width) + 1)
    for commit in curve:
        counts[max(0, int((commit.unix_time - start) / width))] += commit.samples
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts[:-1])]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most about `most` points, each the mean of its neighbours, so that the file stays small."""
    size = max(1, -(-len(points) // most))
    groups = [points[index : index + size] for index in range(0, len(points), size)]
    return [
        (sum(p[0] for p in group) / len(group), sum(p[1] for p in group) / len(group)) for group in groups
    ]


def workers(history: History, start: float) -> list[tuple[float, float]]:
    """Return (first commit of the generation, members) of each generation that survives in the history."""
    surviving = sorted({commit.generation for commit in history.curve()})
    return [(history.first_commit[g] - start, float(len(history.members[g]))) for g in surviving]


def picture(history: History, done: Sequence[Done], name: str) -> str:
    """Return the timeline of a run as SVG. Seconds count from the first commit."""
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
