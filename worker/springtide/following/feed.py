"""Send this member's share of the state to processes that follow, beside training.

Threads and locks: each feed has a thread that connects, copies and sends. `_stepping` is held by the script's
thread while the optimizer changes parameters, and by a feed's thread while it copies one bunch. So a bunch is
copied as it is between two steps, and a feed's frames are queued in the order of the steps. A feed's
condition guards its queue, its buffers and why it is over, and is held for moments only. The script's thread
never waits for a follower: what a feed cannot keep for it ends the feed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from springtide import faults
from springtide.following import frames, shares
from springtide.launch.cgroup import memory_left

log = logging.getLogger(__name__)

MAX_FEEDS: Final = 4
"""Most processes that one member sends to at once."""
KEPT_STEPS: Final = 3
"""Gradients of so many steps are kept for a follower; one that is further behind is left."""
_REST: Final = 1.0
"""Rest of a feed after a bunch, as a multiple of the time to send it: gradients need the link, too."""
_SPARE_BYTES: Final = 256 << 20
"""Memory that is left to the process when a feed has taken its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOrder:
    """The coordinator's word that a process is to be fed.

    Attributes:
        follower: its id.
        address: "ip:port" of it.
        secret: by which it knows members.
        index: number of the share, from 0.
        count: of shares.
    """

    follower: str
    address: str
    secret: bytes
    index: int
    count: int


class Feeds:
    """Keep the feeds of one member. Any thread may call `begin` and `stop`, the script's thread all else."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer, layout_hash: str
    ) -> None:
        """Make it for one script.

        Args:
            parameters: that are trained, in the order that all members have.
            optimizer: that steps them; `shares.can_follow` holds.
            layout_hash: of what the script trains.
        """
        self.parameters, self.optimizer, self.layout_hash = parameters, optimizer, layout_hash
        self.connect_seconds = 10.0
        self.on_bytes: Callable[[int], object] = lambda size: None
        """Is told of bytes that were sent, by the feeds' threads."""
        self._stepping = threading.Lock()
        self._lock = threading.Lock()  # guards the list
        self._feeds: list[_Feed] = []
        self._held = False  # by the script's thread
        self._step = 0  # committed last, as far as was noted

    def begin(self, order: FeedOrder) -> None:
        """Begin to feed a process."""
        feed = _Feed(self, order, self._stepping)
        with self._lock:
            if len(self._feeds) >= MAX_FEEDS:
                log.info("%s is not fed: %d others are", order.follower, MAX_FEEDS)
                return
            self._feeds.append(feed)
        feed.start()

    def before_step(self) -> None:
        """Keep the gradients that the optimizer is about to use, and let nobody copy until `after_step`."""
        if not self._held:  # else a step has failed, and the process is about to end
            self._stepping.acquire()
        self._held = True
        feeds = self._known()
        if not feeds:
            return
        optimizer: Any = self.optimizer
        scaled = getattr(optimizer, "grad_scale", None) is not None
        scaled = scaled or getattr(optimizer, "found_inf", None) is not None
        groups = [shares.plain_options(group) for group in self.optimizer.param_groups]
        plain = [group for group in groups if group is not None]
        if scaled or len(plain) < len(groups):
            why = "its gradients still have a scale in them" if scaled else "its options are no plain numbers"
            for feed in feeds:
                feed.give_up(f"the optimizer's step cannot be made from gradients alone: {why}")
            return
        group_of = {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        for feed in feeds:
            try:
                feed.take_gradients(plain, group_of)
            except (RuntimeError, MemoryError) as error:  # none of it is the step's trouble
                feed.give_up(f"its gradients could not be copied: {error}")

    def after_step(self) -> None:
        """Note that the optimizer has changed the parameters."""
        if self._held:
            self._held = False
            self._stepping.release()

    def committed(self, step: int) -> None:
        """Note that a step is committed, also one that was skipped."""
        self._step = step
        for feed in self._known():
            feed.note_committed(step)

    def finish(self, members: Collection[str]) -> None:
        """End the feeds of processes that are members now, when what is queued has been sent.

        Args:
            members: ids.
        """
        for feed in self._known():
            if feed.follower in members:
                feed.finish()

    def stop(self, reason: str) -> None:
        """End all feeds at once, because what was sent is not this process's state any more."""
        for feed in self._known():
            feed.give_up(reason)

    def ended(self, feed: _Feed) -> None:
        """Forget a feed; its thread calls this at its end."""
        with self._lock:
            self._feeds = [other for other in self._feeds if other is not feed]

    @property
    def step(self) -> int:
        """Return the number of the step that was committed last."""
        return self._step

    def _known(self) -> list[_Feed]:
        with self._lock:
            return list(self._feeds)


class _GivenUpError(Exception):
    """The feed is over; the text says why."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame that waits to be sent.

    Attributes:
        header: of the frame.
        size: bytes of the room that belong to it.
        room: that its gradients are in; None: it has none.
        bunch: whose room it is.
    """

    header: dict[str, Any]
    size: int = 0
    room: torch.Tensor | None = None
    bunch: int = 0


class _Feed:
    """Send one share to one process. `start`, `give_up` and the calls of `Feeds` come from other threads."""

    def __init__(self, feeds: Feeds, order: FeedOrder, stepping: threading.Lock) -> None:
        self.follower = order.follower
        self._feeds, self._order, self._stepping = feeds, order, stepping
        self._bunches = shares.bunches(
            [item.nbytes if shares.fits(item) else 0 for item in feeds.parameters], order.index, order.count
        )
        self._changed = threading.Condition()
        self._queue: deque[_Frame] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}  # by bunch: memory for its gradients
        self._made: dict[int, int] = {}
        self._finishing = False
        self._over = ""
        self._connection: frames.Connection | None = None
        # Written and read under `_stepping`.
        self._followed: list[int] = []
        self._thread = threading.Thread(target=self._run, name="springtide-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- the script's thread, and whoever ends the feed

    def take_gradients(self, groups: list[dict[str, Any]], group_of: dict[int, int]) -> None:
        """Queue a copy of the gradients of what is followed; the caller holds `_stepping`."""
        if not self._followed or self._over or self._finishing:
            return
        taken = [_Frame({"kind": "options", "groups": groups})]
        for bunch in self._followed:
            used = [
                number
                for number in self._bunches[bunch]
                if self._feeds.parameters[number].grad is not None
                and id(self._feeds.parameters[number]) in group_of
            ]
            if not used:
                continue
            room = self._room(bunch)
            if room is None:
                self.give_up(f"it is more than {KEPT_STEPS} steps behind")
                return
            end = 0
            for number in used:
                gradient = self._feeds.parameters[number].grad
                assert gradient is not None
                if (
                    gradient.layout is not torch.strided
                    or gradient.nbytes != self._feeds.parameters[number].nbytes
                ):
                    self.give_up("a gradient is of another form than its parameter")
                    return
                room[end : end + gradient.nbytes].copy_(shares.raw(gradient.contiguous()))
                end += gradient.nbytes
            entries = [[number, group_of[id(self._feeds.parameters[number])]] for number in used]
            taken.append(_Frame({"kind": "gradients", "entries": entries}, end, room, bunch))
        with self._changed:
            self._queue.extend(taken)
            self._changed.notify_all()

    def note_committed(self, step: int) -> None:
        """Queue the word that a step is committed."""
        with self._changed:
            self._queue.append(_Frame({"kind": "committed", "step": step}))
            self._changed.notify_all()

    def finish(self) -> None:
        """Take no more gradients; the feed ends when what is queued has been sent."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def give_up(self, reason: str) -> None:
        """End the feed at once."""
        with self._changed:
            self._over = self._over or reason
            self._queue.clear()
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.shut()

    def _room(self, bunch: int) -> torch.Tensor | None:
        """Return memory for a bunch's gradients; None where all of it is still to be sent."""
        with self._changed:
            if free := self._free.setdefault(bunch, []):
                return free.pop()
            if self._made.get(bunch, 0) >= KEPT_STEPS:
                return None
            self._made[bunch] = self._made.get(bunch, 0) + 1
        size = sum(self._feeds.parameters[number].nbytes for number in self._bunches[bunch])
        return torch.empty(size, dtype=torch.uint8)

    # ---- the feed's thread

    def _run(self) -> None:
        order, began, sent = self._order, time.monotonic(), 0
        try:
            self._connection = frames.connect(order.address, order.secret, self._feeds.connect_seconds)
            try:
                self._check_room()
                sent = self._send_all(self._connection)
            finally:
                self._connection.close()
        except (OSError, ValueError, RuntimeError, _GivenUpError) as error:
            log.info("%s is not fed any more: %s", order.follower, self._over or error)
        else:
            log.info("fed %s %d KiB in %.3f s", order.follower, sent >> 10, time.monotonic() - began)
        finally:
            with self._changed:
                self._over = self._over or "it has ended"
                self._queue.clear()
            self._feeds.ended(self)

    def _check_room(self) -> None:
        own = [self._feeds.parameters[number].nbytes for bunch in self._bunches for number in bunch]
        left, wanted = memory_left(), KEPT_STEPS * sum(own) + 4 * max(own, default=0) + _SPARE_BYTES
        if left is not None and left < wanted:
            raise _GivenUpError("memory is short")

    def _send_all(self, connection: frames.Connection) -> int:
        order, waiting = self._order, deque(range(len(self._bunches)))
        caught_up, rests_until, sent = False, 0.0, 0
        connection.send(
            {
                "kind": "begin",
                "layout": self._feeds.layout_hash,
                "bunches": len(waiting),
                "share": order.index,
            }
        )
        room = torch.empty(0, dtype=torch.uint8)
        while True:
            frame = self._next(bool(waiting), rests_until, caught_up)
            if frame is None and waiting:
                began = time.monotonic()
                faults.reach("feeding", self._feeds.step + 1)
                bunch = waiting.popleft()
                header, room, size = self._copy(bunch, room)
                if header is not None:
                    sent += connection.send(header, [room[:size]])
                    self._feeds.on_bytes(size)
                rests_until = time.monotonic() + _REST * (time.monotonic() - began)
            elif frame is None:
                return sent
            else:
                caught_up = caught_up or frame.header["kind"] == "caught up"
                if frame.room is None:
                    connection.send(frame.header)
                    continue
                sent += connection.send(frame.header, [frame.room[: frame.size]])
                self._feeds.on_bytes(frame.size)
                with self._changed:
                    self._free[frame.bunch].append(frame.room)

    def _next(self, waiting: bool, rests_until: float, caught_up: bool) -> _Frame | None:
        """Return the frame to send next; None for the next bunch, or for the end where none is waiting."""
        with self._changed:
            while True:
                if self._over:
                    raise _GivenUpError(self._over)
                if self._queue:
                    return self._queue.popleft()
                if self._finishing:
                    if waiting:
                        raise _GivenUpError("it is a member before all of the share was sent")
                    return None
                if not waiting and not caught_up:
                    return _Frame({"kind": "caught up"})
                rest = rests_until - time.monotonic() if waiting else None
                if rest is not None and rest <= 0:
                    return None
                self._changed.wait(rest)

    def _copy(self, bunch: int, room: torch.Tensor) -> tuple[dict[str, Any] | None, torch.Tensor, int]:
        """Copy a bunch as it is between two steps, and follow it from then on.

        Args:
            bunch: its number.
            room: memory to use, if it is large enough.

        Returns:
            The frame's header, the memory, and the bytes in it; no header where the bunch cannot travel.
        """
        with self._stepping:
            described = []
            for number in self._bunches[bunch]:
                parameter = self._feeds.parameters[number]
                state = self._feeds.optimizer.state.get(parameter, {})
                if not shares.fits(parameter) or (found := shares.describe(number, parameter, state)) is None:
                    return None, room, 0
                described.append(found)
            size = sum(tensor.nbytes for item in described for tensor in item.tensors)
            if room.numel() < size:
                room = torch.empty(size, dtype=torch.uint8)
            end = 0
            for item in described:
                for tensor in item.tensors:
                    room[end : end + tensor.nbytes].copy_(shares.raw(tensor))
                    end += tensor.nbytes
            self._followed.append(bunch)
        return {"kind": "whole", "entries": [item.description for item in described]}, room, size
