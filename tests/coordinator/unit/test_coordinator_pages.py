"""The coordinator's HTTP pages: the timeline in pages, and behind the token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from coordinator_room import generation, info, state

from springtide_coordinator.history import Commit, History
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership.messages import Start
from springtide_coordinator.settings import Options
from springtide_coordinator.web import (
    NAMED_MEMBERS,
    PAGE_COMMITS,
    PAGE_GENERATIONS,
    Pages,
    TimelinePosition,
    timeline_page,
)
from springtide_protocol.bounded_http import Request
from springtide_protocol.names import Incarnation

TOKEN = "t" * 64


def filled(commits: int, generations: int = 1, members: int = 2) -> History:
    history = History()
    for number in range(1, generations + 1):
        names = tuple(info(f"w{slot}") for slot in range(members))
        start = Start(generation(number), names, state(0), (), fresh=False, reason="because")
        history.generation_made(start, "join", 1.0)
    for step in range(1, commits + 1):
        history.add([Commit(state(step, generations), 100.0 + step, 0.1, 10, {"loss": 1.0})], 0.0, 100.0)
    return history


def test_a_long_timeline_comes_in_pages() -> None:
    history = filled(2 * PAGE_COMMITS + 7)
    steps: list[int] = []
    place, pages = TimelinePosition(), 0
    for _ in range(10):
        page = json.loads(json.dumps(timeline_page(history, place)))
        assert len(page["commits"]) <= PAGE_COMMITS
        steps += [commit["step"] for commit in page["commits"]]
        pages += 1
        place = TimelinePosition(page["next"]["since"], page["next"]["generations_since"])
        if not page["more"]:
            break
    assert not page["more"], f"{pages} pages, and more to come"
    assert steps == list(range(1, 2 * PAGE_COMMITS + 8))
    assert pages == 3


def test_generations_come_in_pages_and_name_few_members() -> None:
    history = filled(1, generations=PAGE_GENERATIONS + 1, members=NAMED_MEMBERS + 3)
    page = timeline_page(history, TimelinePosition())
    again = timeline_page(history, TimelinePosition(generation=PAGE_GENERATIONS))
    assert page["more"] is True
    assert again["more"] is False
    (last,) = again["generations"]  # type: ignore[misc]
    assert (last["generation"], len(last["members"]), last["memberCount"]) == (
        PAGE_GENERATIONS + 1,
        NAMED_MEMBERS,
        NAMED_MEMBERS + 3,
    )


async def test_a_page_needs_the_token_and_is_made_in_the_loop(tmp_path: Path) -> None:
    hub = Hub(Options(token=TOKEN, number=1, state_dir=tmp_path), Incarnation(1, 0))
    hub.history = filled(3)
    pages = Pages(hub, [TOKEN], asyncio.get_running_loop())
    refused = await asyncio.to_thread(pages.answer, Request("/timeline"))
    odd = await asyncio.to_thread(pages.answer, Request("/timeline", {}, {"authorization": "Bearer \udcff"}))
    rightful = {"authorization": f"Bearer {TOKEN}"}
    page = await asyncio.to_thread(pages.answer, Request("/timeline", {"since": "1"}, rightful))
    wrong = await asyncio.to_thread(pages.answer, Request("/timeline", {"since": "9" * 4000}, rightful))
    assert (refused.status, odd.status, wrong.status) == (401, 401, 400)
    assert b"loss" not in refused.body
    assert [commit["step"] for commit in json.loads(page.body)["commits"]] == [2, 3]
