"""The whole story against a make-believe cluster: every event in order, and a report that holds."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_cluster import STEP_SECONDS, FakeCluster
from rich.console import Console

from springtide_demo import reference, report, timeline
from springtide_demo.scenario import ORDER, Pace
from springtide_demo.steplog import StepLogs
from springtide_demo.story import Story, StoryError
from springtide_demo.survivors import unexpected_ends
from springtide_demo.view import View
from springtide_kube.errors import Unreachable

TOTAL = int(25.0 / STEP_SECONDS)
ALONE = f"""
import json, os
with open(os.environ["SPRINGTIDE_STEP_LOG"], "w") as file:
    for step in range(1, {TOTAL} + 1):
        record = {{"step": step, "generation": 0, "incarnation": [0, 0], "time": 1.0, "step_seconds": 1}}
        file.write(json.dumps(record | {{"samples": 8, "values": {{"loss": 1.0 / step}}}}) + "\\n")
"""
# Shorter than the real one, so that the test is: the windows of the report stay as they are.
PACE = Pace(settle=0.2, quiet=0.4, patience=5.0, hurry=0.2, tail=0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    (tmp_path / "steps").mkdir()
    made = FakeCluster(tmp_path / "steps", TOTAL)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def told() -> io.StringIO:
    """Return the stream that the story prints to."""
    return io.StringIO()


@pytest.fixture
def story(cluster: FakeCluster, told: io.StringIO, tmp_path: Path) -> Iterator[Story]:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    run = reference.start([sys.executable, str(script)], {}, tmp_path, tmp_path / "alone")
    view = View(Console(file=told, highlight=False))
    made = Story(cluster, view, StepLogs(cluster.steps), "digits", "default", run, PACE)  # type: ignore[arg-type]
    made.list_seconds = 0.1
    yield made
    run.stop()


def test_the_whole_story_is_told_and_its_report_holds(story: Story, told: io.StringIO) -> None:
    story.run(20.0)
    story.history.add(story.logs.poll())
    assert tuple(done.kind for done in story.done) == ORDER
    restarted = unexpected_ends(story.watch.processes(), story.targets, story.over_at)
    assert restarted == []
    made = report.build(
        story.history.curve(),
        story.alone.curve(),
        story.done,
        story.watch.outcome,
        restarted,
        len(story.history.active()),
    )
    assert json.loads(json.dumps(made)) == made
    assert [event["generation"] for event in made["events"][:3]] == [2, 3, 4]
    # The pauses' windows overlap here: the make-believe story is too short for them.
    broken = [promise.text for promise in report.promises(made) if not promise.holds]
    assert [text for text in broken if "between two commits" not in text] == []
    text = timeline.picture(story.history, story.done, "digits")
    assert all(kind in text for kind in ORDER)
    assert all(f"{kind}: " in told.getvalue() for kind in ORDER)


def test_a_job_that_fails_ends_the_story_with_its_message(story: Story, cluster: FakeCluster) -> None:
    cluster.fails = "ValueError: no such digit"
    with pytest.raises(StoryError, match="the job failed: Broken: ValueError: no such digit"):
        story.run(20.0)


def test_story_in_which_nothing_moves_says_what_it_waits_for(story: Story, cluster: FakeCluster) -> None:
    cluster.wanted = 0
    with pytest.raises(StoryError, match=r"nothing has moved for .* s: waits for the first commit"):
        story.run(1.0)


def test_story_whose_pods_go_in_a_circle_ends_without_steps(
    story: Story, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new pod is a movement, and no step."""
    monkeypatch.setattr(cluster, "total_steps", 1)
    monkeypatch.setattr(cluster, "job", lambda *_: {"status": {"state": "Running"}})
    with pytest.raises(StoryError, match=r"no step was made for .* s"):
        story.run(30.0, no_step=1.0)


def test_story_goes_on_for_as_long_as_steps_are_made(story: Story) -> None:
    """Longer than its patience, by a clock that runs ten times as fast."""
    began = time.monotonic()
    story.run(20.0, no_step=30.0, clock=lambda: began + 10 * (time.monotonic() - began))
    assert tuple(done.kind for done in story.done) == ORDER


def test_a_silent_api_server_is_asked_again(
    story: Story, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> list[object]:
        raise Unreachable("the API server does not answer: connection refused")

    monkeypatch.setattr(cluster, "pods", silent)
    story.observe(1.0)
    monkeypatch.undo()
    story.observe(2.0)
    assert len(story.watch.processes()) == 3
