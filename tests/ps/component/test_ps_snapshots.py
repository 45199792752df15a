"""A cut of what servers hold is read while training goes on, and is what they held at its step."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_members import Store, members, together
from ps_servers import TOKEN, names, servers
from ps_snapshots import joined, states_on
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide import kv
from springtide.checkpoint.staging import GoneError
from springtide.ps.snapshot import Plan, read_shares
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.snapshot import SnapshotKeeper, describe_shard, give
from springtide_ps.server.snapshot_reader import READER_SECONDS
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.client import RefusedError, ServerClient
from springtide_ps.wire.frames import PART_BYTES, Kind
from springtide_ps.wire.stream import parse_address

torch.set_num_threads(1)
KEYS = ("a", "b", "c")
STEP_SPEC = StepSpec(1.0, False, ({"lr": 0.5, "momentum": 0.9},))


def small(number: int) -> Chunk:
    group = {"lr": 0.5, "momentum": 0.9}
    return Chunk(torch.full((2,), float(number)), [(0, 0, 0, 2)], "sgd", [group])


def dumped(chunk: Chunk) -> bytes:
    meta, payload = chunk.dump()
    return json.dumps(meta).encode() + payload.numpy().tobytes()


# ---- the snapshot itself


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "drop", "read", "freeze"]), st.sampled_from(KEYS)), max_size=25
    )
)
def test_whatever_changes_first_a_chunk_is_read_as_it_was(moves: list[tuple[str, str]]) -> None:
    cuts = SnapshotKeeper(lambda: 0.0)
    held = {key: (small(number), 3) for number, key in enumerate(KEYS)}
    wanted: dict[str, bytes] = {}
    name, step = "", 0
    for number, (move, key) in enumerate(moves):
        chunk, version = held.get(key, (None, -1))
        if move == "freeze":
            name, step = f"cut {number}", max((version for _, version in held.values()), default=0)
            # What has not come to the step yet still makes it; its reader waits for that.
            for other, (own, at) in list(held.items()):
                while at < step:
                    own.apply(torch.ones(2), STEP_SPEC)
                    at += 1
                held[other] = own, at
            cuts.take(name, step, 1, [(other, at) for other, (_, at) in held.items()])
            wanted = {other: dumped(own) for other, (own, _) in held.items()}
        elif move == "step" and chunk is not None:
            cuts.before(key, chunk, version)
            chunk.apply(torch.ones(2), STEP_SPEC)
            held[key] = chunk, version + 1
        elif move == "drop" and chunk is not None:
            cuts.before(key, chunk, version)
            del held[key]
        elif move == "read" and name:
            cut = cuts.find(name)
            if key not in wanted:
                with pytest.raises(StepProtocolError):
                    give(cut, key, chunk, version)
                continue
            told = describe_shard(cut, key, chunk, version)
            assert told is not None
            assert "state" in told
            found = give(cut, key, chunk, version)
            assert found is not None
            assert json.dumps(found[0]).encode() + found[1].numpy().tobytes() == wanted.pop(key)


def test_chunk_behind_is_awaited_and_chunk_past_is_refused() -> None:
    cuts, chunk = SnapshotKeeper(lambda: 0.0), small(1)
    cuts.take("one", 4, 1, [("a", 3)])
    cut = cuts.find("one")
    assert describe_shard(cut, "a", chunk, 3) is None
    assert give(cut, "a", chunk, 3) is None
    cuts.before("a", chunk, 3)  # the step to 4 is made
    assert cuts.nbytes == 0
    assert give(cut, "a", chunk, 4) is not None
    with pytest.raises(StepProtocolError, match="past step 2"):
        cuts.take("two", 2, 1, [("a", 4)])
    cuts.take("two", 9, 1, [("a", 4)])
    cuts.before("a", chunk, 4)  # it is dropped before it has come so far
    with pytest.raises(StepProtocolError, match="not here any more"):
        give(cuts.find("two"), "a", None, -1)


def test_copies_go_after_release_replacement_or_a_long_time() -> None:
    now = [0.0]
    cuts, chunk = SnapshotKeeper(lambda: now[0]), small(1)

    def freeze(name: str, readers: int = 2) -> None:
        cuts.take(name, 3, readers, [("a", 3)])
        cuts.before("a", chunk, 3)

    freeze("one")
    assert cuts.nbytes > 0
    cuts.release("one", "m0")
    cuts.release("one", "m0")
    cuts.release("other", "m1")
    assert cuts.nbytes > 0, "m1 has not read"
    cuts.release("one", "m1")
    assert cuts.nbytes == 0
    freeze("two")
    cuts.take("three", 3, 1, [("b", 3)])
    assert cuts.nbytes == 0
    with pytest.raises(StepProtocolError, match="two is not kept here any more"):
        cuts.find("two")
    freeze("four")
    now[0] = READER_SECONDS + 1
    cuts.before("b", chunk, 3)
    with pytest.raises(StepProtocolError, match="four is not kept"):
        cuts.find("four")


def test_members_read_equally_many_bytes_and_everything_once() -> None:
    class Planned:
        def __init__(self, key: str, nbytes: int) -> None:
            self.key, self.nbytes = key, nbytes

    sizes = [1, 400, 3, 70, 70, 70, 300, 5]
    plan: Any = Plan(None, [Planned(str(n), size) for n, size in enumerate(sizes)], [], {}, {})  # type: ignore[arg-type]
    for count in range(1, 12):
        found = read_shares(plan, {}, count)
        assert sorted(key for own in found for key in own) == [str(n) for n in range(len(sizes))]
        most = max(sum(sizes[int(key)] for key in own) for own in found)
        assert most <= sum(sizes) / count + max(sizes)


# ---- through servers


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def equal(one: Any, other: Any) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[index][name], other[index][name]) for index in one for name in one[index])


class Job:
    """Two members. every: of its parameters."""

    def __init__(self, running: Any, a: Any, b: Any) -> None:
        self.running, self.a, self.b = running, a, b
        self.every = {index: index for index in range(len(a.layout.fields))}
        self.begin(1, fresh=True)

    def begin(self, number: int, **how: Any) -> None:
        store, both = Store(), ["m0", "m1"]
        together(
            lambda: self.a.begin(number, both, self.running, store, **how),
            lambda: self.b.begin(number, both, self.running, store, holds=not how.get("fresh"), **how),
        )
        together(self.a.exchange.resolve, self.b.exchange.resolve)

    def step(self) -> None:
        together(lambda: self.a.push(0, 2), lambda: self.b.push(1, 2))
        self.a.commit()
        self.b.commit()

    def snapshots(self, name: str) -> list[Any]:
        return [member.exchange.snapshot(name, 2, self.every) for member in (self.a, self.b)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("replication", [1, 2])
def test_steps_go_on_between_the_cut_and_its_reading(early: bool, replication: int) -> None:
    with servers(2) as running, members(2, adam, early=early, replication=replication) as (a, b):
        job = Job(running, a, b)
        job.step()
        job.step()
        wanted = states_on(a.exchange)
        snapshots = job.snapshots("two")
        for _ in range(3):
            job.step()
        found = joined([snapshot.collect(index, 2) for index, snapshot in enumerate(snapshots)])
        assert equal(found["optimizer"], wanted)
        assert not equal(states_on(a.exchange), wanted)
        with pytest.raises(GoneError, match="is not kept here any more"):
            snapshots[0].collect(0, 2)  # another cut was made


def test_step_that_one_member_has_not_committed_is_awaited() -> None:
    with servers(2) as running, members(2, adam) as (a, b):
        job = Job(running, a, b)
        job.step()
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        a.commit()
        early = a.exchange.snapshot("two", 2, job.every)  # the servers have not made that step
        late: list[Any] = []

        def rest() -> None:
            b.commit()
            late.append(b.exchange.snapshot("two", 2, job.every))

        parts_ = together(lambda: early.collect(0, 2), rest)
        found = joined([parts_[0], late[0].collect(1, 2)])
        assert equal(found["optimizer"], states_on(a.exchange))


def test_what_leaves_a_server_is_read_from_it_as_it_was() -> None:
    with servers(3) as running, members(2, adam) as (a, b):
        job = Job(running, a, b)
        job.step()
        wanted = states_on(a.exchange)
        snapshots = job.snapshots("one")
        leaving = frozenset([f"s{running[2].port}"])
        number = 2
        job.begin(number, step=1, leaving=leaving)
        while not (a.exchange.settled and leaving.isdisjoint(a.exchange.in_use)):
            # A generation that begins takes back copies that are not made yet.
            for _ in range(2**number):
                job.step()
            number += 1
            assert number < 12
            job.begin(number, step=a.step, leaving=leaving)
        job.step()
        found = joined([snapshot.collect(index, 2) for index, snapshot in enumerate(snapshots)])
        assert equal(found["optimizer"], wanted)


def test_drained_server_ends_in_a_generation_and_no_step_fails() -> None:
    with servers(3) as running, members(2, adam) as (a, b):
        job = Job(running, a, b)
        job.step()
        leaving = frozenset([f"s{running[2].port}"])
        number = 2
        job.begin(number, step=1, leaving=leaving)
        assert not leaving.isdisjoint(a.exchange.in_use)
        assert set(leaving) <= set(a.exchange.connections) & set(b.exchange.connections)
        while not leaving.isdisjoint(a.exchange.in_use):
            for _ in range(2**number):
                job.step()
            number += 1
            assert number < 12
            job.begin(number, step=a.step, leaving=leaving)
        job.step()
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))
        running[2].close(30.0)
        together(a.commit, b.commit)
        for _ in range(3):
            job.step()
        assert leaving.isdisjoint([*a.exchange.connections, *b.exchange.connections])


def test_a_server_that_is_gone_is_named() -> None:
    with servers(2) as running, members(2, adam) as (a, b):
        job = Job(running, a, b)
        job.step()
        first, second = job.snapshots("one")
        running[1].close(30.0)
        with pytest.raises(GoneError, match=f"parameter server 127.0.0.1:{running[1].port}"):
            first.collect(0, 2)
        first.close()
        second.close()
        again = a.exchange.snapshot("two", 1, job.every)
        with pytest.raises(GoneError, match="parameter server"):
            again.collect(0, 1)
        again.close()


def test_pushes_without_common_steps_do_not_reach_the_cut() -> None:
    token = (1, 0, 1)
    with servers() as running, closing(ServerClient(parse_address(names(running)[0]), TOKEN)) as client:

        def ask(kind: Kind, about: dict[str, Any], **more: Any) -> Any:
            return client.ask_step(kind, token, about, **more).result(30)

        ask(Kind.ENTER, {"me": "m0", "members": ["m0"], "s": 0, "lineage": "x", "books": True, "skipped": 0})
        meta, payload = small(1).dump()
        ask(Kind.LOAD, {**meta, "k": "a", "s": 0}, payload=payload)
        about = {"k": "a", "recipe": STEP_SPEC.to_json()}

        def push(number: int) -> torch.Tensor:
            out = torch.zeros(2)
            ask(Kind.PUSH_BATCH, {**about, "r": number}, payload=torch.ones(2), out=out, typed=True)
            return out

        wanted = push(0).clone()
        ask(Kind.SNAPSHOT, {"s": 0, "name": "cut", "readers": 1})
        push(1)
        assert not torch.equal(push(2), wanted)
        answer = ask(Kind.READ_SNAPSHOT, {"name": "cut", "me": "m0", "k": "a"}, any_size=True)
        held = Chunk.load(answer.meta, answer.payload)
        assert torch.equal(held.values, wanted)
        assert held.applied_batches is not None
        assert list(held.applied_batches.intervals.missing(0, 3)) == [1, 2]
        with pytest.raises(RefusedError, match="not here any more"):
            ask(Kind.READ_SNAPSHOT, {"name": "cut", "me": "m0", "k": "a"}, any_size=True)
        old = (1, 0, 0)
        client.ask_step(Kind.SNAPSHOT, old, {"s": 0, "name": "cut", "readers": 1}).result(30)  # it is there
        with pytest.raises(RefusedError, match="generation"):
            client.ask_step(Kind.SNAPSHOT, old, {"s": 0, "name": "old", "readers": 1}).result(30)


@pytest.mark.slow
@pytest.mark.parametrize("part_bytes", [PART_BYTES, 100])
@pytest.mark.parametrize("strategy", ["ParameterServer", "Hybrid"])
def test_tables_are_in_the_cut(strategy: str, part_bytes: int) -> None:
    """Slices of them in one part or in many; rows that there are before training go to servers in as many."""
    store, count = Store(), 2

    def script(rank: Rank) -> Any:
        with seeded(1):
            table = springtide.Embedding(None, 4, seed=3, slices=4)
            model = torch.nn.Sequential(table, torch.nn.Linear(4, 1))
        before = torch.arange(50, 150), torch.randn(100, 4, generator=torch.Generator().manual_seed(2))
        table.table.local.hold(*before)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        rank.distribute(model, optimizer)
        assert rank.trainer.servers is not None
        rank.trainer.servers.connections.part_bytes = part_bytes
        rank.enter_servers(names(running), store)
        assert all(map(torch.equal, table.export(), before))
        wanted: Any = None
        for batch in rank.batches((torch.arange(48), torch.randn(48, 1)), batch_size=8, epochs=2, seed=0):
            if rank.step_number == 4:
                wanted = table.export()
                snapshot = rank.trainer.take_snapshot("three", rank.rank, range(count))
            with rank.step():
                ids, y = batch
                (model(ids % (8 + 4 * rank.step_number)) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        rank.runtime.settle(None)
        assert len(table.export()[0]) > len(wanted[0])
        try:
            return wanted, snapshot.collect(rank.runtime.group.rank, count)
        finally:
            snapshot.close()

    with servers(2) as running:
        results = on_ranks(count, script, strategy=strategy, token=TOKEN)
    (ids, rows), _ = results[0]
    tree = joined([part for _, part in results])
    assert bool(tree["optimizer"]) is (strategy == "ParameterServer")
    pieces = [Slice.load(json.loads(held["about"]), held["memory"]) for held in tree["tables"].values()]
    assert len(pieces) == 4
    held = [piece.table.held() for piece in pieces]
    found, values = torch.cat([part[0] for part in held]), torch.cat([part[2] for part in held])
    order = torch.argsort(found)
    assert torch.equal(found[order], ids)
    assert torch.equal(values[order], rows)


def test_an_answer_that_cannot_be_sent_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers() as running, kv.connect(names(running), TOKEN) as client:
        values = torch.arange(100.0)
        client.init("w", values)
        with monkeypatch.context() as small:
            small.setattr("springtide_ps.wire.frames.PAYLOAD_LIMIT", 100)
            with pytest.raises(RefusedError, match="400 bytes, 100 are the limit"):
                client.pull("w", torch.empty(100))
        assert torch.equal(client.pull("w", torch.empty(100)), values)
