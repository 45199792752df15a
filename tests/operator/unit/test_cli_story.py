import io

import pytest
from cli_fake_kube import event, job
from rich.console import Console

from springtide_cli import story as stories
from springtide_cli.jobview import progress, view
from springtide_cli.screen import LiveScreen, PlainScreen, facts, make_screen, panel
from springtide_cli.story import Line, Story, Tone
from springtide_cli.watch import Back, Disconnected, Seen

WAITING = (False, "WaitingForWorkers", "2 of 3 workers are ready")
TRAINING = (True, "Training", "3 of 3 workers train in generation 1")
NUMBERS = {
    "state": "Running",
    "step": 240,
    "generation": 1,
    "samplesPerSecond": "1034",
    "goodput": "0.98",
    "workers": {"summary": "3/3", "ready": 3, "replicas": 3},
    "restarts": {"total": 1},
    "data": {"epoch": 3, "totalSeen": 4311, "repeated": 0, "lost": 0},
    "values": {"test_accuracy": "0.978"},
    "lastRecoverySeconds": "0.31",
    "message": "3 of 3 workers train in generation 1",
}


def tell(*seen: object, start: Story | None = None) -> tuple[Story, list[str]]:
    story, said = start or Story(since=0.0), []
    for item in seen:
        story, lines = stories.job_news(
            story, item if isinstance(item, Disconnected | Back | Seen) else Seen("MODIFIED", item)
        )  # type: ignore[arg-type]
        said += [line.text for line in lines]
    return story, said


def test_conditions_are_told_when_they_change_and_only_then() -> None:
    waiting = {"Running": WAITING, "Degraded": (False, "Healthy", ""), "Failed": (False, "", "")}
    training = waiting | {"Running": TRAINING}
    degraded = training | {"Degraded": (True, "WorkerSilent", "digits-worker-2-1 has not called init()")}
    _, said = tell(
        job(),
        job(conditions=waiting),
        job(conditions=waiting, startTime="now"),
        job(conditions=training),
        job(conditions=degraded),
        job(conditions=training),
        job(conditions=waiting),
    )
    assert said == [
        "waiting: 2 of 3 workers are ready (WaitingForWorkers)",
        "Running: 3 of 3 workers train in generation 1",
        "Degraded: digits-worker-2-1 has not called init()",
        "no longer Degraded: Healthy",
        "no longer Running: 2 of 3 workers are ready",
    ]


def test_the_tone_follows_what_a_change_means() -> None:
    before = view(job(conditions={"Degraded": (True, "X", "bad")}))
    now = Seen("MODIFIED", job(conditions={"Degraded": (False, "Healthy", ""), "Running": TRAINING}))
    _, lines = stories.job_news(Story(0.0, before), now)
    assert [line.tone for line in lines] == [Tone.GOOD, Tone.GOOD]
    _, lines = stories.job_news(
        Story(0.0, view(job(conditions={"Running": TRAINING}))),
        Seen("MODIFIED", job(conditions={"Running": WAITING})),
    )
    assert [line.tone for line in lines] == [Tone.BAD]


def test_numbers_are_told_when_they_move() -> None:
    line = "step 240, epoch 3, 3/3 workers, generation 1, 1034 samples/s, goodput 0.98, 1 restart"
    _, said = tell(job(**NUMBERS), job(**NUMBERS), job(**(NUMBERS | {"step": 250, "restarts": {"total": 2}})))
    assert said == [line, line.replace("240", "250").replace("1 restart", "2 restarts")]
    assert progress(view(job(workers={"summary": "0/3"}))) == ""


def test_success_ends_with_0_and_the_account() -> None:
    story, said = tell(job(**NUMBERS, conditions={"Succeeded": (True, "WorkerFinished", "done")}))
    assert said[0] == "Succeeded: done"
    assert story.ending is not None
    assert story.ending.code == 0
    assert [line.text for line in story.ending.lines] == [
        "digits succeeded after 240 steps",
        "samples: 4311 seen, 0 repeated, 0 lost",
        "reported: test_accuracy 0.978",
    ]
    assert all(line.tone is not Tone.BAD for line in story.ending.lines)


def test_a_success_that_lost_samples_does_not_look_clean() -> None:
    lossy = NUMBERS | {"data": {"totalSeen": 10, "lost": 2}}
    story, _ = tell(job(**lossy, conditions={"Succeeded": (True, "WorkerFinished", "done")}))
    assert story.ending is not None
    assert (story.ending.lines[1].text, story.ending.lines[1].tone) == (
        "samples: 10 seen, 0 repeated, 2 lost",
        Tone.BAD,
    )


def test_failure_ends_with_1_the_message_and_where_the_log_is() -> None:
    failure = {"pod": "digits-worker-0-7", "message": "ValueError: bad (train.py:31 in main)"}
    story, _ = tell(
        job(lastFailure=failure, conditions={"Failed": (True, "BackoffLimitExceeded", "7 failures, limit 6")})
    )
    assert story.ending is not None
    assert story.ending.code == 1
    assert [line.text for line in story.ending.lines] == [
        "digits failed: 7 failures, limit 6",
        "last failure, in digits-worker-0-7: ValueError: bad (train.py:31 in main)",
        "its log: kubectl logs -n default digits-worker-0-7",
    ]
    again = {"Failed": (True, "InvalidTemplate", f"because {failure['message']}")}
    story, _ = tell(job(lastFailure=failure, conditions=again))
    assert story.ending is not None
    assert [line.text for line in story.ending.lines][1:] == [
        "its log: kubectl logs -n default digits-worker-0-7"
    ]


def test_deleted_job_exits_1_and_an_ended_one_keeps_its_ending() -> None:
    leaving = job(conditions={"Running": TRAINING})
    leaving["metadata"]["deletionTimestamp"] = "now"
    story, said = tell(job(conditions={"Running": TRAINING}), leaving, Seen("DELETED", leaving))
    assert said[-1] == "digits is being deleted"
    assert story.ending is not None
    assert (story.ending.code, story.ending.lines[0].text) == (1, "digits was deleted before it ended")
    done = job(conditions={"Succeeded": (True, "WorkerFinished", "done")})
    story, _ = tell(done, Seen("DELETED", done))
    assert story.ending is not None
    assert story.ending.code == 0


def test_another_job_of_the_same_name_is_not_followed() -> None:
    story, said = tell(
        job(), job(uid="u2", conditions={"Failed": (True, "X", "other")}), Seen("DELETED", job(uid="u2"))
    )
    assert said == []
    assert story.ending is None


def test_an_api_server_that_goes_and_comes_back() -> None:
    story, said = tell(job(), Disconnected("the API server at X does not answer: refused"))
    assert said == ["the API server at X does not answer: refused; the job goes on without it, still trying"]
    assert stories.tick(story, 100.0)[1] == []  # then the operator is not to blame
    story, said = tell(Back(), start=story)
    assert said == ["the API server answers again"]
    assert stories.tick(story, 100.0)[1] != []


def test_a_job_that_nobody_takes_up_is_said_once() -> None:
    story, _ = tell(job())
    story, lines = stories.tick(story, stories.OPERATOR_PATIENCE - 0.1)
    assert lines == []
    story, lines = stories.tick(story, stories.OPERATOR_PATIENCE)
    assert "no operator has taken up the job for 15 s" in lines[0].text
    assert stories.tick(story, 100.0) == (story, [])
    taken, _ = tell(job(state="Pending"))
    assert stories.tick(taken, 100.0)[1] == []


def test_events_are_told_once_and_again_when_they_repeat() -> None:
    story, _ = tell(job())
    said = []
    for item in [
        event("WorkerFailed", "digits-worker-1-1 failed\n", kind="Warning"),
        event("WorkerFailed", "digits-worker-1-1 failed", kind="Warning"),
        event("WorkerFailed", "digits-worker-1-1 failed", kind="Warning", count=3),
        event("Scaled", "3 -> 5", uid="e2"),
    ]:
        story, lines = stories.event_news(story, item, 0.0)
        said += [(line.text, line.tone) for line in lines]
    assert said == [
        ("WorkerFailed: digits-worker-1-1 failed", Tone.BAD),
        ("WorkerFailed: digits-worker-1-1 failed (x3)", Tone.BAD),
        ("Scaled: 3 -> 5", Tone.PLAIN),
    ]


def test_an_event_that_repeats_a_condition_is_not_told_twice() -> None:
    story, _ = tell(job(conditions={"Running": TRAINING}))
    assert stories.event_news(story, event("Training", TRAINING[2]), 0.0)[1] == []
    assert stories.event_news(story, event("Training", "", uid="e3"), 0.0)[1] == [Line("Training: ")]


def test_condition_told_by_its_event_is_shown_at_its_return_only() -> None:
    story, _ = tell(job())
    story, lines = stories.event_news(story, event("Training", TRAINING[2]), 0.0)
    assert len(lines) == 1
    story, said = tell(job(conditions={"Running": TRAINING}), start=story)
    assert said == []
    _, said = tell(job(conditions={"Running": WAITING}), job(conditions={"Running": TRAINING}), start=story)
    assert said == [f"no longer Running: {WAITING[2]}", f"Running: {TRAINING[2]}"]


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (29, "Scaled: 3 -> 5"),
        (31, "31 s ago: Scaled: 3 -> 5"),
        (300, "5 min ago: Scaled: 3 -> 5"),
        (7300, "2 h ago: Scaled: 3 -> 5"),
    ],
)
def test_an_event_from_before_is_told_with_its_age(age: float, text: str) -> None:
    old = event("Scaled", "3 -> 5", kind="Warning") | {"lastTimestamp": "2026-01-01T00:00:00Z"}
    _, lines = stories.event_news(Story(0.0), old, 1767225600.0 + age)
    assert [line.text for line in lines] == [text]
    assert (lines[0].tone is Tone.QUIET) == (age > 30)


def test_the_workers_going_at_the_end_is_no_progress() -> None:
    ended = {"Succeeded": (True, "WorkerFinished", "done")}
    gone = NUMBERS | {"workers": {"summary": "0/3"}}
    assert tell(job(**NUMBERS), job(**gone, conditions=ended))[1][1:] == ["Succeeded: done"]
    later = gone | {"step": 300}
    assert tell(job(**NUMBERS), job(**later, conditions=ended))[1][2].startswith("step 300")


# ---- screens


def test_plain_lines_carry_the_time_and_no_colour() -> None:
    out = io.StringIO()
    with PlainScreen(Console(file=out, width=20, force_terminal=False), clock=lambda: 0.0) as screen:
        screen.say(Line("[bold]a long line that is not wrapped", Tone.BAD))
        screen.say(Line("two\nlines"))
        screen.show(view(job(**NUMBERS)))
    lines = out.getvalue().splitlines()
    assert [line[8:] for line in lines] == ["  [bold]a long line that is not wrapped", "  two", "  lines"]
    assert "\x1b" not in out.getvalue()


def test_the_live_screen_shows_what_is_known_below_the_lines() -> None:
    out = io.StringIO()
    with LiveScreen(Console(file=out, width=80, force_terminal=True), clock=lambda: 0.0) as screen:
        screen.say(Line("Running: it trains", Tone.GOOD))
        screen.show(view(job(**NUMBERS)))
    assert "Running: it trains" in out.getvalue()
    assert "default/digits" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_fits_the_output(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert isinstance(make_screen(console), LiveScreen if terminal else PlainScreen)
    assert isinstance(make_screen(console, plain=True), PlainScreen)


def test_panel_names_every_known_number_and_omits_the_rest() -> None:
    assert facts(view(job(**NUMBERS))) == [
        ("state", "Running"),
        ("workers", "3/3 train, 3 ready, 3 pods"),
        ("step", "240  (epoch 3)"),
        ("generation", "1"),
        ("samples/s", "1034"),
        ("goodput", "0.98"),
        ("restarts", "1"),
        ("last recovery", "0.31 s"),
        ("", "3 of 3 workers train in generation 1"),
    ]
    told = {"progress": 40, "estimatedCompletionTime": "2026-05-01T12:30:00Z"}
    text = "40 % done, the rest by about 2026-05-01 12:30:00 UTC"
    assert ("", text) in facts(view(job(**NUMBERS, **told)))
    assert ("", "40 % done") in facts(view(job(**NUMBERS, progress=40)))
    assert f"step 240, {text}, epoch 3" in progress(view(job(**NUMBERS, **told)))
    assert facts(view(job())) == [("state", "waiting for the operator")]
    assert ("servers", "1/2 ready") in facts(view(job(**NUMBERS, parameterServers={"summary": "1/2"})))


@pytest.mark.parametrize(
    ("conditions", "colour"),
    [
        (None, "bright_black"),
        ({"Running": WAITING}, "yellow"),
        ({"Running": TRAINING}, "green"),
        ({"Running": TRAINING, "Degraded": (True, "X", "")}, "red"),
        ({"Failed": (True, "X", "")}, "red"),
    ],
)
def test_the_border_tells_the_state(conditions: dict[str, tuple[bool, str, str]] | None, colour: str) -> None:
    assert panel(view(job(conditions=conditions)), 75.0).border_style == colour


def test_a_status_with_odd_values_is_no_error() -> None:
    odd = view(
        job(step="7", workers=None, data={"epoch": True}, conditions=None, values=None, restarts=None, x=1)
    )
    assert (odd.step, odd.epoch, odd.restarts, odd.data) == (None, None, 0, {})
