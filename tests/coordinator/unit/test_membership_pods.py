"""Pods whose processes train one model together take part in a generation as a whole, or not at all."""

from __future__ import annotations

from coordinator_room import Room, state
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.pods import states_there, whole
from springtide_protocol.names import StateName


def process(name: str) -> say.MemberInfo:
    """`a1` is the process with local rank 1 of pod `a`, in the slot of its letter."""
    return say.MemberInfo(
        name, pod_uid=name[0], pod_name=f"pod-{name[0]}", local_rank=int(name[1]), slot=ord(name[0])
    )


class Pods(Room):
    """A room of pods of two processes that train as one."""

    def come(self, *names: str) -> None:
        for name in names:
            self.hello(name, as_info=process(name))

    def stop(
        self,
        *names: str,
        reason: say.ParkReason = say.ParkReason.STANDBY,
        at: StateName | None = None,
    ) -> None:
        for name in names:
            made = self.m.members[name].generation
            self.tell(name, say.Parked(reason, made, at, "layout", together=2))


def trained() -> tuple[Pods, StateName]:
    room = Pods(target=4, minimum=2)
    room.come("a0", "a1", "b0", "b1")
    room.stop("a0", "a1", "b0", "b1")
    assert room.members == ("a0", "a1", "b0", "b1")
    return room, room.form()


def test_pod_joins_when_all_its_processes_are_ready() -> None:
    room = Pods(target=2, minimum=2)
    room.come("a0", "a1", "b0", "b1")
    room.stop("a0", "b0", "a1")
    assert room.members == ("a0", "a1")
    begun = room.form()
    room.tick(5.0)
    assert room.told("a0", say.Boundary) == 0
    room.stop("b1")
    assert room.told("a0", say.Boundary) == 1
    room.stop("a0", "a1", reason=say.ParkReason.BOUNDARY, at=begun)
    assert room.members == ("a0", "a1", "b0", "b1")


def test_half_a_pod_is_left_out_of_the_next_generation() -> None:
    room, begun = trained()
    room.sync("a", "b")
    room.lose("b1")
    room.tick(5.0)
    assert room.told("a0", say.Prepare) == 1
    # The other process of the pod holds a newer state, and it is there in part only.
    room.stop("b0", reason=say.ParkReason.REDUCTION_FAILED, at=StateName(begun.generation, 9))
    room.stop("a0", "a1", reason=say.ParkReason.DROPPED, at=begun)
    room.sync("a")
    assert room.members == ("a0", "a1")
    assert room.last("a0", say.Start).state == begun


def test_process_that_waits_for_a_lost_one_is_not_waited_for() -> None:
    room, begun = trained()
    room.sync("a", "b")
    room.lose("b1")
    room.tick(5.0)
    # Its own process 0 is in a collective with the lost one, and cannot park.
    room.stop("a0", "a1", reason=say.ParkReason.DROPPED, at=begun)
    assert room.members == ("a0", "a1")
    again = room.form()
    assert again == begun
    # Both come back: the pod joins as a whole.
    room.come("b1")
    room.stop("b1", "b0", reason=say.ParkReason.DROPPED, at=begun)
    assert room.told("a0", say.Boundary) == 1


def test_all_processes_of_a_pod_leave_when_one_is_asked_to() -> None:
    room, begun = trained()
    room.tell("b1", say.Leaving("SIGTERM"))
    assert room.told("a0", say.Boundary) == 1
    room.stop("a0", "a1", "b0", "b1", reason=say.ParkReason.BOUNDARY, at=begun)
    assert room.members == ("a0", "a1")
    assert room.told("b0", say.Leave) == room.told("b1", say.Leave) == 1


def test_cut_off_process_takes_its_pod_along() -> None:
    room, begun = trained()
    for _ in range(8):
        if room.members != ("a0", "a1", "b0", "b1"):
            break
        room.stop("b1", reason=say.ParkReason.FORMATION_FAILED, at=begun)
        room.stop("b0", "a0", "a1", reason=say.ParkReason.DROPPED, at=begun)
        if set(room.members) == {"a0", "a1", "b0", "b1"}:
            room.form()
    assert len(room.members) == 2
    assert room.members in (("a0", "a1"), ("b0", "b1"))


def test_maximum_of_processes_takes_whole_pods() -> None:
    room = Pods(target=2, minimum=2, maximum=2)
    room.come("a0", "b0", "b1", "a1")
    room.stop("b1", "a0", "b0", "a1")
    assert len({name[0] for name in room.members}) == 1
    assert len(room.members) == 2


def record(name: str, together: int, held: StateName | None = None) -> Record:
    found = Record(process(name), 0, state=held)
    found.together = together
    return found


names = st.sets(st.sampled_from([f"{pod}{rank}" for pod in "abcd" for rank in range(3)]))


@given(names)
def test_whole_keeps_exactly_the_complete_pods(there: set[str]) -> None:
    kept = [r.info.id for r in whole(record(name, 3) for name in sorted(there))]
    complete = {pod for pod in "abcd" if {f"{pod}{rank}" for rank in range(3)} <= there}
    assert kept == sorted(name for name in there if name[0] in complete)
    # Processes that train by themselves are never left out.
    assert len(whole(record(name, 1) for name in there)) == len(there)


@given(
    st.dictionaries(
        st.sampled_from([f"{pod}{rank}" for pod in "abc" for rank in range(2)]), st.integers(1, 3)
    )
)
def test_state_is_there_when_each_local_rank_holds_it(held: dict[str, int]) -> None:
    found = states_there([record(name, 2, state(step)) for name, step in held.items()])
    expected = {
        step
        for step in held.values()
        if {int(name[1]) for name, other in held.items() if other == step} == {0, 1}
    }
    assert {known.step for known in found} == expected
    assert {known.step for known in states_there([record(n, 1, state(s)) for n, s in held.items()])} == set(
        held.values()
    )
