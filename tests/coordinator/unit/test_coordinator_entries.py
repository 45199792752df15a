"""Each member of a generation hears of all entries that the others set, in whatever order things happen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from hand_turned_loop import Loop
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.hub import Hub, WorkerStream
from springtide_coordinator.rendezvous import PAUSE_SECONDS_PER_MEMBER
from springtide_coordinator.settings import Options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_to_proto, speaks_to_proto
from springtide_protocol.names import GenerationName, Incarnation
from springtide_protocol.store_entries import unpack
from springtide_protocol.versions import OWN

NAMES = ("w0", "w1", "w2")
MEMBERS = len(NAMES)


class World:
    """A hub and the members of its job, which keep what they set and say it again on a new stream."""

    def __init__(self) -> None:
        self.loop = Loop()
        options = Options(token="t", number=1, state_dir=Path("unused"), target=MEMBERS, minimum=MEMBERS)
        self.hub = Hub(options, Incarnation(1), lambda: self.loop.now, self.loop.later)
        self.streams: dict[str, WorkerStream] = {}
        self.kept: dict[str, dict[str, bytes]] = {}
        self._state: pb.StateName | None = None
        for name in NAMES:
            self._open(name, pb.STARTING)
            self._say(name, parked=pb.Parked(reason=pb.STANDBY))
        self._begin(1)

    @property
    def generation(self) -> GenerationName:
        current = self.hub.membership.current
        assert current is not None
        return current.name

    def set(self, name: str, key: str, value: bytes) -> None:
        """Have a member set an entry, which it keeps; without a stream nobody hears of it yet."""
        self.kept[name][key] = value
        if name in self.streams:
            self._put(name, key)

    def lose(self, name: str) -> None:
        """Break a member's stream."""
        if name in self.streams:
            self.hub.closed(self.streams.pop(name))

    def come_again(self, name: str) -> None:
        """Have a member open another stream, and the one before, if it is open, end after that."""
        before = self.streams.pop(name, None)
        self._open(name, pb.ACTIVE)
        for key in self.kept[name]:
            self._put(name, key)
        if before is not None:
            self.hub.closed(before)

    def begin_again(self) -> None:
        """Have all members form the generation and stop after a step, so that there is another one."""
        generation = generation_to_proto(self.generation)
        for name in self.kept:
            if name not in self.streams:
                self.come_again(name)
            self._say(name, formed=pb.Formed(generation=generation))
        self._state = pb.StateName(generation=generation, step=1)
        for name in self.kept:
            self._say(name, parked=pb.Parked(reason=pb.BOUNDARY, generation=generation, state=self._state))
        self._begin(generation.number + 1)

    async def lacking(self) -> dict[str, set[str]]:
        """Return by member which of the others' entries did not come on its stream; it ends the streams."""
        return {
            name: {
                key
                for other, entries in self.kept.items()
                for key, value in entries.items()
                if other != name and heard.get(key) != value
            }
            for name, heard in [(name, await self._heard(name)) for name in sorted(self.streams)]
        }

    async def _heard(self, name: str) -> dict[str, bytes]:
        stream, heard = self.streams[name], dict[str, bytes]()
        stream.end()
        messages: AsyncIterator[pb.CoordinatorMessage] = stream.messages()
        async for message in messages:
            entries = message.store_entries
            if message.HasField("store_entries") and entries.generation == generation_to_proto(
                self.generation
            ):
                heard.update(unpack(entries.packed))
        return heard

    def _begin(self, number: int) -> None:
        self.loop.turn(1.0)
        current = self.hub.membership.current
        assert current is not None
        assert current.name.number == number
        self.kept = {name: {} for name in current.order}

    def _open(self, name: str, standing: pb.Standing.ValueType) -> None:
        stream = self.streams[name] = self.hub.new_stream()
        hello = pb.Hello(
            speaks=speaks_to_proto(OWN), member=pb.Member(id=name, pod_uid=name), standing=standing
        )
        if standing != pb.STARTING:
            hello.generation.CopyFrom(generation_to_proto(self.generation))
            if self._state is not None:
                hello.state.CopyFrom(self._state)
        self.hub.hello(stream, hello)
        assert not stream.ended

    def _put(self, name: str, key: str) -> None:
        generation = generation_to_proto(self.generation)
        entry = pb.StoreEntry(generation=generation, key=key, value=self.kept[name][key])
        self._say(name, store_set=entry)

    def _say(self, name: str, **message: Any) -> None:
        self.hub.receive(self.streams[name], pb.WorkerMessage(**message))


async def test_leaders_entry_comes_after_another_came_again() -> None:
    """A member said all its entries again on a new stream; the leader's is of the next generation."""
    world = World()
    for name in world.kept:
        world.set(name, f"place/{name[1:]}", b"1")
    world.loop.turn(1.0)
    world.come_again("w2")
    world.begin_again()
    world.set("w0", "loops/0", b"0")
    world.loop.turn(2 * PAUSE_SECONDS_PER_MEMBER * MEMBERS)
    assert await world.lacking() == {"w0": set(), "w1": set(), "w2": set()}


ACTIONS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(NAMES), st.sampled_from(["place", "loops", "block/0"])),
    st.tuples(st.just("lose"), st.sampled_from(NAMES)),
    st.tuples(st.just("come_again"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin_again")),
    st.tuples(st.just("turn"), st.sampled_from([0.0, 0.0004, 0.001, 0.0015, 0.01])),
)


@given(st.lists(ACTIONS, max_size=40))
async def test_members_hear_of_all_entries_in_any_order(actions: Sequence[tuple[Any, ...]]) -> None:
    world = World()
    for action, *arguments in actions:
        match action:
            case "set":
                name, family = arguments
                world.set(name, f"{family}/{name[1:]}", f"of {name} in {world.generation}".encode())
            case "turn":
                world.loop.turn(*arguments)
            case _:
                getattr(world, action)(*arguments)
    for name in world.kept:
        if name not in world.streams:
            world.come_again(name)
    world.loop.turn(2 * PAUSE_SECONDS_PER_MEMBER * MEMBERS)
    assert not any((await world.lacking()).values())
