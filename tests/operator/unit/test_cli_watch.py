import asyncio
from collections.abc import AsyncIterator

import pytest
from cli_fake_kube import UNREACHABLE, FakeKube, job, pod, until
from hypothesis import given
from hypothesis import strategies as st

from springtide_cli import watch
from springtide_cli.podlogs import PodLogs, Reading, container, has_ended, has_started, split_stamp
from springtide_cli.watch import Back, Disconnected, Seen
from springtide_kube.errors import ApiRefusal

PATH = "/apis/x"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(watch, "LONGEST_PAUSE", 0.004)
    monkeypatch.setattr("springtide_cli.podlogs.AGAIN_SECONDS", 0.001)


def following(kube: FakeKube) -> AsyncIterator[watch.News]:
    return watch.follow(kube, PATH, {"fieldSelector": "metadata.name=digits"})


async def take(news: AsyncIterator[watch.News], count: int) -> list[watch.News]:
    async with asyncio.timeout(60):
        return [await anext(news) for _ in range(count)]


async def test_existing_objects_come_first_then_every_change() -> None:
    kube, first = FakeKube(), job()
    kube.lists[PATH] = [[first]]
    news = following(kube)
    assert await take(news, 1) == [Seen("ADDED", first)]
    second, third = job(step=1), job(uid="u2")
    kube.send(PATH, "MODIFIED", second)
    kube.send(PATH, "ADDED", third)
    kube.send(PATH, "DELETED", third)
    assert await take(news, 3) == [Seen("MODIFIED", second), Seen("ADDED", third), Seen("DELETED", third)]
    query = kube.opened[0][1]
    assert query["fieldSelector"] == "metadata.name=digits"
    assert query["watch"] == "1"
    assert int(query["resourceVersion"]) > int(first["metadata"]["resourceVersion"])


async def test_a_watch_that_ends_goes_on_from_its_last_version() -> None:
    kube = FakeKube()
    kube.lists[PATH] = [[]]
    news = following(kube)
    changed = job(step=1)
    bookmark = {"kind": "TrainingJob", "metadata": {"resourceVersion": "999999"}}
    kube.send(PATH, "ADDED", changed)
    kube.stream(PATH).put_nowait(None)
    kube.send(PATH, "BOOKMARK", bookmark)
    kube.stream(PATH).put_nowait(None)
    last = job(step=2)
    kube.send(PATH, "MODIFIED", last)
    assert await take(news, 2) == [Seen("ADDED", changed), Seen("MODIFIED", last)]
    versions = [query["resourceVersion"] for _, query in kube.opened]
    assert versions[1:] == [changed["metadata"]["resourceVersion"], "999999"]
    assert len([r for r in kube.requests if r[0] == "GET"]) == 1


@pytest.mark.parametrize("code", [410, 504])
async def test_a_history_that_is_gone_is_listed_again_without_a_gap(code: int) -> None:
    kube, stays, goes, new = FakeKube(), job(), job(name="b", uid="u2"), job(name="c", uid="u3")
    changed = job(step=7)
    kube.lists[PATH] = [[stays, goes], [changed, new]]
    news = following(kube)
    kube.send(PATH, "ERROR", {"code": code, "message": "too old"})
    assert await take(news, 2) == [Seen("ADDED", stays), Seen("ADDED", goes)]
    assert await take(news, 3) == [Seen("DELETED", goes), Seen("MODIFIED", changed), Seen("ADDED", new)]


async def test_what_did_not_change_in_a_break_is_not_told_again() -> None:
    kube, same = FakeKube(), job()
    kube.lists[PATH] = [[same]]
    kube.stream(PATH).put_nowait(UNREACHABLE)
    news = following(kube)
    changed = job(step=1)
    kube.send(PATH, "MODIFIED", changed)
    assert await take(news, 4) == [
        Seen("ADDED", same),
        Disconnected(str(UNREACHABLE)),
        Back(),
        Seen("MODIFIED", changed),
    ]


async def test_a_long_silence_is_said_once() -> None:
    kube = FakeKube()
    kube.lists[PATH] = [UNREACHABLE, UNREACHABLE, ApiRefusal(503, "", "starting"), [job()]]
    told = await take(following(kube), 3)
    assert [type(item) for item in told] == [Disconnected, Back, Seen]
    assert len(kube.requests) == 4


@pytest.mark.parametrize(
    "broken", ['{"type": "ADDED", "obj', "[]", '{"type": "ERROR", "object": {"code": 500}}', None]
)
async def test_a_broken_watch_is_listed_again(broken: str | None) -> None:
    kube = FakeKube()
    kube.lists[PATH] = [[]]
    kube.stream(PATH).put_nowait(broken)
    assert [type(item) for item in await take(following(kube), 2)] == [Disconnected, Back]


@pytest.mark.parametrize("code", [401, 403, 404])
async def test_a_refusal_that_asking_again_cannot_help_is_raised(code: int) -> None:
    kube = FakeKube()
    kube.lists[PATH] = [ApiRefusal(code, "", "no")]
    with pytest.raises(ApiRefusal, match="no"):
        await take(following(kube), 1)


# ---- logs of pods


def test_which_container_and_when() -> None:
    assert container(pod("a", uid="1", containers=("proxy", "worker"))) == "worker"
    assert container(pod("a", uid="1", containers=("main", "proxy"))) == "main"
    assert has_started(pod("a", uid="1", state="running"))
    assert has_started(pod("a", uid="1", state="terminated"))
    assert not has_started(pod("a", uid="1", state="waiting"))
    assert not has_started({"spec": {"containers": [{"name": "worker"}]}})
    assert has_ended(pod("a", uid="1", phase="Failed"))
    assert not has_ended(pod("a", uid="1"))


def test_the_time_is_cut_from_a_line() -> None:
    assert split_stamp("2026-01-02T03:04:05.678901234Z hello") == ("2026-01-02T03:04:05.678901234Z", "hello")
    assert split_stamp("2026-01-02T03:04:05Z") == ("2026-01-02T03:04:05Z", "")
    assert split_stamp("2026-01-02T03:04:05.6+08:00 a") == ("2026-01-02T03:04:05.6+08:00", "a")
    assert split_stamp("hello 2026") == ("", "hello 2026")


async def test_logs_are_followed_over_breaks_without_repeating_lines() -> None:
    kube, written = FakeKube(), []
    logs = PodLogs(kube, lambda name, line: written.append((name, line)))
    path = "/api/v1/namespaces/default/pods/w-0/log"
    first, second, third = (
        "2026-01-01T00:00:01.1Z one",
        "2026-01-01T00:00:01.2Z two",
        "2026-01-01T00:00:01.3Z three",
    )
    for item in (
        ApiRefusal(400, "BadRequest", "is waiting to start"),
        first,
        second,
        UNREACHABLE,
        first,
        second,
        third,
    ):
        kube.stream(path).put_nowait(item)
    logs.news(Seen("ADDED", pod("w-0", uid="p", state="waiting", phase="Pending")))
    assert kube.opened == []
    logs.news(Seen("MODIFIED", pod("w-0", uid="p")))
    logs.news(Seen("MODIFIED", pod("w-0", uid="p")))
    await until(lambda: len(written) >= 3)
    logs.news(Seen("MODIFIED", pod("w-0", uid="p", phase="Succeeded", state="terminated")))
    kube.stream(path).put_nowait(None)
    kube.stream(path).put_nowait(None)
    await logs.finish(5)
    assert written == [("w-0", "one"), ("w-0", "two"), ("w-0", "three")]
    assert [query.get("sinceTime") for _, query in kube.opened[:3]] == [None, None, "2026-01-01T00:00:01.2Z"]
    assert all(query["container"] == "worker" for _, query in kube.opened)


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_every_line_is_shown_once_at_any_times_and_breaks(gaps: list[int], breaks: list[int]) -> None:
    """A gap of 0: a line of the same time as the one before. breaks: of lines read until each."""
    at = 0
    lines = [(f"2026-01-01T00:00:{(at := at + gap):02d}Z", str(number)) for number, gap in enumerate(gaps)]
    reading, shown = Reading(), list[str]()
    for length in [*breaks, len(lines)]:
        reading.connected()
        sent = [line for line in lines if line[0] >= reading.since]
        shown += [text for stamp, text in sent[:length] if reading.is_new(stamp)]
    assert shown == [text for _, text in lines]


def test_lines_after_a_clock_went_back_are_shown() -> None:
    reading = Reading()
    reading.connected()
    assert all(reading.is_new(f"2026-01-01T00:00:0{second}Z") for second in (5, 1, 2))


async def test_log_of_a_gone_pod_ends_and_a_silent_one_is_cut() -> None:
    kube = FakeKube()
    logs = PodLogs(kube, lambda name, line: None)
    gone, silent = (f"/api/v1/namespaces/default/pods/{name}/log" for name in ("gone", "silent"))
    kube.stream(gone).put_nowait(ApiRefusal(404, "NotFound", "no such pod"))
    logs.news(Seen("ADDED", pod("gone", uid="1")))
    logs.news(Seen("ADDED", pod("silent", uid="2")))
    logs.news(Disconnected("x"))
    async with asyncio.timeout(60):
        await logs.finish(0.01)
    assert sorted(path for path, _ in kube.opened) == sorted([gone, silent])
