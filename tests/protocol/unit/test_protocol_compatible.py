"""Messages of the last release mean the same today, and new kinds of messages have capabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from protocol_record import Record, today

from springtide_protocol.versions import CAPABILITY_OF

LAST: Record = json.loads((Path(__file__).parents[1] / "last_release.json").read_text(encoding="utf-8"))
KINDS = ("WorkerMessage", "CoordinatorMessage", "ServerMessage", "ServerOrder")


def changes(last: Record, now: Record) -> list[str]:
    """Return what the last release would misunderstand, or would miss."""
    return [
        f"{message}, number {number}: {meaning}, now {now.get(message, {}).get(number, 'nothing')}"
        for message, fields in last.items()
        for number, meaning in fields.items()
        if now.get(message, {}).get(number) != meaning
    ]


def without_capability(last: Record, now: Record, capability_of: dict[str, str]) -> list[str]:
    """Return the kinds of messages that the last release does not know, and that need no capability."""
    added = {number: meaning for kind in KINDS for number, meaning in now[kind].items() - last[kind].items()}
    return [meaning for meaning in added.values() if meaning.split()[-1] not in capability_of]


def test_numbers_of_the_last_release_mean_the_same() -> None:
    assert not changes(LAST, today()), "give what is new a number of its own (coordinator.proto)"


def test_new_kinds_of_messages_need_a_capability() -> None:
    assert not without_capability(LAST, today(), dict(CAPABILITY_OF)), "name it in versions.CAPABILITY_OF"


@pytest.mark.parametrize(
    ("number", "meaning"), [("4", ".springtide.coordinator.v1.StoreEntries store_entries"), ("4", "")]
)
def test_number_with_another_meaning_is_found(number: str, meaning: str) -> None:
    kinds = {key: value for key, value in {**today()["CoordinatorMessage"], number: meaning}.items() if value}
    [found] = changes(LAST, {**today(), "CoordinatorMessage": kinds})
    assert found.startswith("CoordinatorMessage, number 4: .springtide.coordinator.v1.StoreEntry store_entry")


def test_new_kind_without_a_capability_is_found() -> None:
    now = {**today(), "ServerOrder": {**today()["ServerOrder"], "99": ".springtide.coordinator.v1.Tide tide"}}
    known = dict(CAPABILITY_OF)
    assert without_capability(LAST, now, known) == [".springtide.coordinator.v1.Tide tide"]
    assert without_capability(LAST, now, {**known, "tide": "tides"}) == []
