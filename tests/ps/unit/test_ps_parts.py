"""The parameter server's parts that know no sockets: frames, proofs, updates, the store, placement."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.optim import Update, UpdateError
from springtide_ps.params.placement import place, split, spread
from springtide_ps.server.kv_store import Store, StoreError
from springtide_ps.server.settings import read
from springtide_ps.wire import auth, frames
from springtide_ps.wire.frames import Frame, FrameError, Kind

# ---- frames and proofs


def test_a_frame_comes_back_as_it_was() -> None:
    raw = frames.pack(Frame(Kind.INIT, 7, {"key": "w", "shape": [2, 3]}, 24))
    header = frames.unpack_header(raw[: frames.HEADER_BYTES])
    assert (header.kind, header.request, header.payload_bytes) == (Kind.INIT, 7, 24)
    assert frames.unpack_meta(raw[frames.HEADER_BYTES :]) == {"key": "w", "shape": [2, 3]}


def test_frames_of_the_last_release_are_read() -> None:
    for version in (frames.OLDEST_VERSION, frames.VERSION):
        raw = frames.pack(Frame(Kind.INIT, 7, {"key": "w"}, 24), version)
        assert frames.unpack_header(raw[: frames.HEADER_BYTES]).kind is Kind.INIT
    assert frames.VERSION - frames.OLDEST_VERSION <= 1


@pytest.mark.parametrize(
    ("version", "side"), [(frames.VERSION + 1, "this side"), (frames.OLDEST_VERSION - 1, "the peer")]
)
def test_frames_of_another_release_name_what_to_upgrade(version: int, side: str) -> None:
    raw = frames.pack(Frame(Kind.PULL, 1), version)
    with pytest.raises(FrameError, match=f"version {version}, .* upgrade springtide in the image of {side}$"):
        frames.unpack_header(raw)


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ({}, frames.OLDEST_VERSION),
        ({"newest": frames.VERSION}, frames.VERSION),
        ({"newest": 99}, frames.VERSION),
    ],
)
def test_connection_speaks_what_both_sides_read(told: dict[str, int], version: int) -> None:
    assert frames.version_in(told) == version


@pytest.mark.parametrize("told", [1, "3", None, True, 3.0])
def test_version_that_cannot_be_is_refused(told: object) -> None:
    with pytest.raises(FrameError, match="no version of frames"):
        frames.version_in({"newest": told})


def test_kind_of_a_later_release_is_read_as_unknown() -> None:
    raw = bytearray(frames.pack(Frame(Kind.PUSH, 7, {}, 24)))
    raw[5] = 255
    header = frames.unpack_header(raw)
    assert (header.kind, header.request, header.payload_bytes) == (Kind.UNKNOWN, 7, 24)


@given(st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES))
@settings(deadline=None)
def test_any_bytes_are_a_header_or_refused(raw: bytes) -> None:
    for candidate in (raw, frames.MAGIC + raw[4:], frames.MAGIC + b"\x01\x0a" + raw[6:]):
        try:
            header = frames.unpack_header(candidate)
        except FrameError:
            continue
        assert header.meta_bytes <= frames.META_LIMIT
        assert header.payload_bytes <= frames.PAYLOAD_LIMIT


@pytest.mark.parametrize("raw", [b"[1]", b"{", b"\xff", b"[" * 60_000, b"{}{}", b'{"k":1} x'])
def test_meta_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        frames.unpack_meta(raw)


def test_frames_over_the_limits_are_not_sent() -> None:
    with pytest.raises(FrameError, match="beside its tensor"):
        frames.pack(Frame(Kind.PUSH, 1, {"key": "x" * frames.META_LIMIT}))
    with pytest.raises(FrameError, match="in chunks"):
        frames.pack(Frame(Kind.PUSH, 1, {}, frames.PAYLOAD_LIMIT + 1))


def test_tensors_that_cannot_travel_are_refused() -> None:
    for tensor in (torch.zeros(4, 4).t()[1:], torch.zeros(3).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(ValueError, match="contiguous, dense and on the CPU"):
            frames.memory(tensor)
    assert len(frames.memory(torch.zeros(0))) == 0


def test_a_proof_belongs_to_token_role_and_nonces() -> None:
    right = auth.proof("t", "client", "a", "b")
    assert auth.holds(right, "t", "client", "a", "b")
    for other in (("u", "client", "a", "b"), ("t", "server", "a", "b"), ("t", "client", "b", "a")):
        assert not auth.holds(right, *other)
    assert not auth.holds(None, "t", "client", "a", "b")


# ---- updates

OPTIMIZERS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": [0.8, 0.9]}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
]


@pytest.mark.parametrize(("name", "kind", "options"), OPTIMIZERS)
def test_an_update_in_chunks_is_torch_s_on_the_whole(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(100)
    whole = torch.nn.Parameter(values.clone())
    optimizer = kind([whole], **{k: tuple(v) if k == "betas" else v for k, v in options.items()})  # type: ignore[call-arg]
    pieces = [values[:30].clone(), values[30:].clone()]
    updates = [Update(name, options).bind(piece) for piece in pieces]
    for _ in range(5):
        gradient = torch.randn(100)
        whole.grad = gradient.clone()
        optimizer.step()
        for update, part in zip(updates, (gradient[:30], gradient[30:]), strict=True):
            update(part.clone())
    torch.testing.assert_close(torch.cat(pieces), whole.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lion", {}, "no update 'lion': choose one of assign, sum, sgd"),
        ("sgd", {"momentun": 0.9}, "sgd has no option momentun: its options are dampening, lr"),
        ("sum", {"lr": 1}, "sum has no option lr"),
        ("adam", {"betas": [0.9]}, "betas is .0.9., expected two numbers"),
        ("sgd", {"lr": math.nan}, "lr is nan, expected a finite number"),
        ("sgd", {"lr": True}, "lr is True"),
        ("sgd", {"nesterov": 1}, "expected true or false"),
        ("sgd", {"nesterov": True}, "Nesterov momentum requires a momentum"),
        ("adam", {"lr": -1}, "Invalid learning rate"),
    ],
)
def test_updates_that_cannot_be_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UpdateError, match=message):
        Update(name, options)


# ---- the store


def test_the_first_init_wins_and_another_shape_is_refused() -> None:
    store = Store()
    assert store.create("w", torch.ones(3))
    assert not store.create("w", torch.zeros(3))
    with store.entry("w").reading() as lease:
        assert lease.values.tolist() == [1, 1, 1]
    with pytest.raises(StoreError, match="is there with shape"):
        store.create("w", torch.zeros(4))
    with pytest.raises(StoreError, match="there is no key 'v'"):
        store.entry("v")


def test_what_is_being_read_stays_as_it_is() -> None:
    store = Store()
    store.use(Update("sgd", {"lr": 1.0, "momentum": 0.5}))
    store.create("w", torch.zeros(3))
    entry = store.entry("w")
    lease = entry.push_pull(torch.ones(3))
    memory = frames.memory(lease.values)
    first = bytes(memory)
    entry.push(torch.ones(3))
    assert bytes(memory) == first
    entry.give_back(lease)
    with entry.reading() as now:
        assert now.values.tolist() == [-2.5, -2.5, -2.5]  # the momentum went on over the copy
        assert now.version == 2
    address = entry.lease().values.data_ptr()
    assert entry.lease().values.data_ptr() == address


def test_without_readers_an_update_needs_no_memory() -> None:
    store = Store()
    store.use(Update("sum"))
    store.create("w", torch.zeros(3))
    entry = store.entry("w")
    with entry.reading() as lease:
        address = lease.values.data_ptr()
    entry.push(torch.ones(3))
    with entry.reading() as lease:
        assert lease.values.data_ptr() == address
        assert lease.values.tolist() == [1, 1, 1]


def test_memory_is_bounded_and_updates_fit_the_dtype() -> None:
    store = Store(memory_limit=100)
    store.create("w", torch.zeros(20))
    with pytest.raises(StoreError, match="use more servers, or give them more memory"):
        store.create("v", torch.zeros(20))
    with pytest.raises(StoreError, match="1 to 512 characters"):
        store.create("", torch.zeros(1))
    store.create("n", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(StoreError, match="'n': sgd needs floating point values"):
        store.use(Update("sgd", {"lr": 0.1}))
    store.use(Update("sum"))
    store.entry("n").push(torch.ones(2, dtype=torch.int64))
    assert store.status() == {"keys": 2, "tables": 0, "rows": 0, "evicted": 0, "bytes": 96, "updates": 1}


# ---- placement


@given(
    st.lists(st.integers(0, 5_000_000), min_size=1, max_size=40),
    st.integers(1, 8),
    st.sampled_from([1 << 16, 1 << 20, 4 << 20]),
)
@settings(deadline=None, max_examples=100)
def test_no_server_holds_much_more_than_its_share(sizes: list[int], servers: int, chunk_bytes: int) -> None:
    chunks = [c for i, size in enumerate(sizes) for c in split(f"t{i}", size, 4, chunk_bytes)]
    for i, size in enumerate(sizes):
        mine = [c for c in chunks if c.key == f"t{i}"]
        assert mine[0].start == 0
        assert mine[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
    placed = place(chunks, {f"ps-{n}": 0 for n in range(servers)})
    loads = [sum(c.nbytes for c in chunks if placed[c.name] == f"ps-{n}") for n in range(servers)]
    assert max(loads) <= sum(loads) / servers + max(c.nbytes for c in chunks)
    assert placed == place(list(reversed(chunks)), {f"ps-{n}": 0 for n in reversed(range(servers))})


def test_one_large_tensor_beside_a_thousand_small_ones() -> None:
    chunks = split("embedding", 125_000_000, 4)
    for number in range(1000):
        chunks += split(f"bias{number}", 256, 4)
    placed = place(chunks, dict.fromkeys(("a", "b", "c"), 0))
    loads = [sum(c.nbytes for c in chunks if placed[c.name] == server) for server in ("a", "b", "c")]
    assert max(loads) <= 1.05 * sum(loads) / 3 + 4 * 1024 * 1024


def test_spreading_takes_all_servers_and_needs_one() -> None:
    chunks = split("w", 8 * 1024 * 1024, 4)
    assert sorted(spread(chunks, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
    for refused in (lambda: spread(chunks, 0), lambda: place(chunks, {})):
        with pytest.raises(ValueError, match="no parameter server"):
            refused()
    with pytest.raises(ValueError, match="cannot hold elements"):
        split("w", 10, 8, 4)


# ---- settings


def test_settings_name_the_variable_that_is_wrong() -> None:
    assert read({"SPRINGTIDE_TOKEN": "t"}).port == 7080
    for environment, message in (
        ({}, "SPRINGTIDE_TOKEN: not set"),
        (
            {"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_PS_PORT": "70000"},
            "SPRINGTIDE_PS_PORT: '70000' is no number",
        ),
        ({"SPRINGTIDE_TOKEN": "t", "SPRINGTIDE_TLS_KEY": "k"}, "belong together"),
    ):
        with pytest.raises(ValueError, match=message):
            read(environment)
