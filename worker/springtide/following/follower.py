"""Take the state from members that train, before this process is one of them.

Threads and locks: a thread accepts connections, and one for each of them receives into the live parameters
and steps them. The script's thread waits, and reads from them only after `end` has ended all threads. One
condition guards the list of feeds and what is known of each; memory for the optimizer's state is taken under
it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from springtide import faults
from springtide.following import frames, shares
from springtide.following.replay import Replay
from springtide.memory.ready import ReadyMemory
from springtide_protocol.limits import FOLLOW_SECRET_BYTES

log = logging.getLogger(__name__)

MAX_LATE_STEPS: Final = 8
MAX_LATE_SECONDS: Final = 60.0
"""A process that was ready for so many steps, and so many seconds, and is not admitted follows no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Name what a process that follows has of its script.

    Attributes:
        parameters: that are trained, in the order that all members have.
        optimizer: that steps them.
        layout_hash: of what the script trains.
        ready: memory for the optimizer's state.
    """

    parameters: Sequence[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    layout_hash: str
    ready: ReadyMemory


@dataclass(slots=True)
class _Feed:
    """One connection, as far as it has come."""

    connection: frames.Connection
    replay: Replay
    thread: threading.Thread | None = None
    step: int = -1  # all of it has come and is made here
    caught_up: bool = False
    late_steps: int = 0  # committed after all was caught up
    over: str = ""  # why it has ended


class Follower:
    """Listen for members, and take from them what they send. Only the script's thread calls it."""

    def __init__(
        self,
        script: Script,
        address: str,
        silence_seconds: float,
        on_bytes: Callable[[int], object],
        overwrite: Callable[[], object],
    ) -> None:
        """Begin to listen.

        Args:
            script: of this process.
            address: IP to listen on.
            silence_seconds: limit of the silence of a member's machine.
            on_bytes: is told of bytes that have come, by any thread.
            overwrite: is called before the first byte of a live parameter changes, by any thread.

        Raises:
            OSError: it cannot listen.
        """
        self._script, self._silence = script, silence_seconds
        self._on_bytes, self._overwrite = on_bytes, overwrite
        self._changed = threading.Condition()
        self._feeds: list[_Feed] = []
        self._expected: int | None = None
        self._bytes = 0
        self._closed = False
        self._caught_up_at: float | None = None
        self.secret = secrets.token_bytes(FOLLOW_SECRET_BYTES)
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._accepting = threading.Thread(target=self._accept_all, name="springtide-follow", daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self._listener.getsockname()[1])

    @property
    def received(self) -> int:
        """Return the bytes that have come."""
        return self._bytes

    def expect(self, count: int) -> None:
        """Take no more than so many connections."""
        with self._changed:
            self._expected = count
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all that was to come has come, or cannot come any more.

        Args:
            seconds: to wait, at most.

        Returns:
            Whether it is so.
        """
        with self._changed:
            return self._changed.wait_for(self._is_settled, seconds)

    def end(self, step: int | None, seconds: float) -> list[str]:
        """Take what is on its way, end all threads, and give the optimizer the state that is here.

        Args:
            step: of the state that the others begin from; None: wait for nothing.
            seconds: to wait until that step is made here, at most.

        Returns:
            Why members have ended before, in words.
        """
        with self._changed:
            self._closed = True
            if step is not None:
                self._changed.wait_for(
                    lambda: all(feed.over or feed.step >= step for feed in self._feeds), seconds
                )
            feeds = list(self._feeds)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for a connection
        for feed in feeds:
            feed.connection.shut()
        self._accepting.join()
        self._listener.close()
        for feed in feeds:
            if feed.thread is not None:
                feed.thread.join()
            feed.connection.close()
        self._give_states([feed.replay.states for feed in feeds])
        return [feed.over for feed in feeds if feed.over and step is not None and feed.step < step]

    def _give_states(self, states: Sequence[dict[int, dict[str, Any]]]) -> None:
        """Give the optimizer the state that is here, in the order in which its own step would make it."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._script.parameters)}
        found = {number: state for some in states for number, state in some.items() if state}
        for group in self._script.optimizer.param_groups:
            for parameter in group["params"]:
                if (number := numbers.get(id(parameter))) in found:
                    self._script.optimizer.state[parameter] = found[number]

    def _is_settled(self) -> bool:
        if self._expected is None or len(self._feeds) < self._expected:
            return False
        return all(feed.over or feed.caught_up for feed in self._feeds)

    # ---- threads of its own

    def _accept_all(self) -> None:
        while True:
            with self._changed:
                full = self._expected is not None and len(self._feeds) >= self._expected
                if self._closed or full:
                    return
            self._listener.settimeout(0.1)
            try:
                connection = frames.accept(self._listener, self.secret, self._silence)
            except TimeoutError:
                continue
            except OSError:
                return  # it was shut
            if connection is None:
                log.warning("a connection without the secret of this process was refused")
                continue
            feed = _Feed(connection, Replay(self._script.optimizer, self._script.parameters))
            feed.thread = threading.Thread(
                target=self._receive_all, args=(feed,), name="springtide-followed", daemon=True
            )
            if not self._take_on(feed):
                return

    def _take_on(self, feed: _Feed) -> bool:
        with self._changed:
            if self._closed:
                feed.connection.close()
                return False
            self._feeds.append(feed)
            assert feed.thread is not None
            feed.thread.start()
            return True

    def _receive_all(self, feed: _Feed) -> None:
        reception = _Reception(self, feed)
        try:
            while True:
                reception.take()
        except OSError as error:
            why = str(error)
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
            why = f"what a member sends cannot be followed: {type(error).__name__}: {error}"
            log.warning("%s", why)
        feed.connection.shut()
        with self._changed:
            feed.over = why
            self._look()

    def note(self, feed: _Feed, *, step: int | None = None, caught_up: bool = False, size: int = 0) -> None:
        """Note what has come from a member; its thread calls this.

        Args:
            feed: of the member.
            step: that is made here.
            caught_up: nothing but steps to come is left.
            size: bytes.

        Raises:
            ConnectionAbortedError: there is no use in following any more.
        """
        with self._changed:
            self._bytes += size
            if caught_up:
                feed.caught_up = True
            if step is not None:
                feed.step = step
                feed.late_steps += self._caught_up_at is not None
            self._look()
        if size:
            self._on_bytes(size)
        if step is not None and self._is_late(feed):
            raise ConnectionAbortedError("this process is not admitted, so it follows no more")

    def _look(self) -> None:
        """Note when all has come, and wake those that wait; the caller holds the condition."""
        if self._caught_up_at is None and self._is_settled():
            self._caught_up_at = time.monotonic()
        self._changed.notify_all()

    def _is_late(self, feed: _Feed) -> bool:
        at = self._caught_up_at
        return (
            at is not None and feed.late_steps > MAX_LATE_STEPS and time.monotonic() - at > MAX_LATE_SECONDS
        )

    def overwrite(self) -> None:
        """Note that live memory is about to change."""
        self._overwrite()

    @property
    def script(self) -> Script:
        """Return what this process has of its script."""
        return self._script

    def room_for(
        self, parameter: torch.Tensor, form: tuple[torch.dtype, torch.Size, torch.device]
    ) -> torch.Tensor:
        """Return memory for a tensor of the optimizer's state.

        Args:
            parameter: that it belongs to.
            form: of `shares.form_of`.
        """
        dtype, shape, device = form
        if shape == parameter.shape and device == parameter.device:
            with self._changed:
                found = self._script.ready.take(parameter.detach(), dtype)
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False) if found is None else found
        return torch.empty(shape, dtype=dtype, device=device)


class _Reception:
    """Take the frames of one connection, one after another. Its thread alone uses it."""

    def __init__(self, follower: Follower, feed: _Feed) -> None:
        self._follower, self._feed = follower, feed
        self._groups: list[dict[str, Any]] = []
        self._room = torch.empty(0, dtype=torch.uint8)
        self._begun = False

    def take(self) -> None:
        """Take the next frame.

        Raises:
            OSError: the connection has ended.
            ValueError: it is no frame that a member sends; as RuntimeError, KeyError, IndexError, TypeError.
        """
        header, size = self._feed.connection.receive()
        kind = header["kind"]
        if kind == "begin":
            if header.get("layout") != self._follower.script.layout_hash:
                raise ValueError("the member trains another model, or with other options")
            self._begun = True
        elif not self._begun:
            raise ValueError("a member did not say what it trains")
        elif kind == "whole":
            self._take_whole(header["entries"], size)
        elif kind == "options":
            self._groups = [dict(group) for group in header["groups"]]
        elif kind == "gradients":
            self._take_gradients(header["entries"], size)
        elif kind == "committed":
            self._follower.note(self._feed, step=int(header["step"]))
        elif kind == "caught up":
            self._follower.note(self._feed, caught_up=True)
        else:
            raise ValueError(f"{kind!r} is no kind of frame")

    def _take_whole(self, entries: Sequence[dict[str, Any]], size: int) -> None:
        script, replay = self._follower.script, self._feed.replay
        places: list[torch.Tensor] = []
        states: dict[int, dict[str, Any]] = {}
        for described in entries:
            number, state = _number(described["number"], len(script.parameters)), dict[str, Any]()
            parameter = script.parameters[number]
            if not shares.fits(parameter):
                raise ValueError("a parameter lies here otherwise than at the member")
            places.append(parameter.detach())
            for entry in described["state"]:
                if "value" in entry:
                    state[str(entry["key"])] = entry["value"]
                    continue
                state[str(entry["key"])] = room = self._follower.room_for(
                    parameter, shares.form_of(entry, parameter)
                )
                places.append(room)
            states[number] = state
        if sum(place.nbytes for place in places) != size:
            raise ValueError(f"{size} bytes were sent for tensors of another size")
        faults.reach("following", max(0, self._feed.step) + 1)
        self._follower.overwrite()
        for number in states:
            replay.forget(number)
        self._fill(places)
        for number, state in states.items():
            replay.keep(number, state)
        self._follower.note(self._feed, size=size)

    def _fill(self, places: Sequence[torch.Tensor]) -> None:
        """Receive the bytes of these tensors, those on a device by way of the host's memory."""
        connection = self._feed.connection
        for place in places:
            target = shares.raw(place)
            if place.device.type == "cpu":
                connection.fill(target)
            else:
                room = self._take_room(place.nbytes)
                connection.fill(room)
                target.copy_(room)

    def _take_gradients(self, entries: Sequence[Sequence[int]], size: int) -> None:
        script = self._follower.script
        numbers = [_number(number, len(script.parameters)) for number, _ in entries]
        sizes = [script.parameters[number].nbytes for number in numbers]
        if sum(sizes) != size:
            raise ValueError(f"{size} bytes were sent for gradients of another size")
        room = self._take_room(size)
        self._feed.connection.fill(room)
        gradients: dict[int, torch.Tensor] = {}
        end = 0
        for number, own in zip(numbers, sizes, strict=True):
            parameter = script.parameters[number]
            came = room[end : end + own]
            if came.storage_offset() % parameter.element_size():
                came = came.clone()  # behind numbers of fewer bytes
            came = came.view(parameter.dtype).view(parameter.shape)
            gradients[number] = came if parameter.device.type == "cpu" else came.to(parameter.device)
            end += own
        self._feed.replay.step(gradients, {number: int(group) for number, group in entries}, self._groups)
        self._follower.note(self._feed, size=size)

    def _take_room(self, size: int) -> torch.Tensor:
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room[:size]


def _number(told: Any, count: int) -> int:
    if not isinstance(told, int) or not 0 <= told < count:
        raise ValueError(f"{told!r} is no number of a parameter")
    return told
