"""Values of a step within a group: its first member fetches them, and each passes on what it has to the next.

A chain, as the state of a joiner passes along one (pieces flow while later ones still come), so that no
member sends more than one copy, and servers send one for a whole group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

import torch

from springtide.comm.process_group import Group, Work

_IN_FLIGHT = 2
"""Most messages under way in each direction. When a group is shut, each message under way may cost a quarter
of a second.
"""
_END_SECONDS = 10.0


class RelayChain:
    """One member's part in the chain of its group. All members begin the same steps in the same order.

    group: nobody else sends messages in it. Steps are carried out by a thread of its own.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(1, "springtide-relay")
        self._running: list[Future[Any]] = []

    @property
    def receives(self) -> bool:
        """Whether the values come from the member before this one."""
        return self._group.rank > 0

    def begin(
        self,
        pieces: Mapping[str, torch.Tensor],
        fetch: Callable[[str], None],
        chosen: Collection[str] | None = None,
        in_parts: bool = False,
    ) -> dict[str, Future[bool]]:
        """Begin to pass a step's values on, in the order of `pieces`, which all members name alike.

        Args:
            pieces: Memory by key, where they come to and go on from.
            fetch: At the first member, return when the piece of this key is there, or raise RuntimeError.
            chosen: Pieces that are passed on, by the first member's choice, which tells the others; None, at
                all members: every one.
            in_parts: The first member begins several times, with other pieces chosen each time, until it has
                passed all of them on; the others begin once.

        Returns:
            By key, when it is there, or False: it does not come.
        """
        arrived: dict[str, Future[bool]] = {key: Future() for key in pieces}
        self._running = [job for job in self._running if not job.done()]
        in_parts = in_parts and self.receives
        self._running.append(
            self._thread.submit(self._pass, dict(pieces), fetch, dict(arrived), chosen, in_parts)
        )
        return arrived

    def _pass(
        self,
        pieces: dict[str, torch.Tensor],
        fetch: Callable[[str], None],
        arrived: dict[str, Future[bool]],
        chosen: Collection[str] | None,
        in_parts: bool,
    ) -> None:
        sent, coming = deque[Work](), deque[Work]()
        try:
            left = set(pieces)
            while left:
                keys = list(pieces)
                if chosen is not None:
                    keys = self._choose(keys, chosen, sent)
                self._pass_all(keys, pieces, fetch, arrived, sent, coming)
                left -= set(keys)
                if not in_parts:
                    break
            for key in left:
                arrived[key].set_result(False)
        except Exception as error:
            # Whatever it is: nobody is to wait for what does not come.
            self._group.shut()
            _end(*coming, *sent)
            for future in arrived.values():
                if not future.done():
                    future.set_exception(RuntimeError(f"a group passes values on: {error}"))

    def _pass_all(
        self,
        keys: Sequence[str],
        pieces: Mapping[str, torch.Tensor],
        fetch: Callable[[str], None],
        arrived: Mapping[str, Future[bool]],
        sent: deque[Work],
        coming: deque[Work],
    ) -> None:
        group = self._group
        for number, key in enumerate(keys):
            if group.rank == 0:
                fetch(key)
            else:
                for later in keys[number + len(coming) : number + _IN_FLIGHT]:
                    coming.append(group.start_receive(pieces[later], group.rank - 1))
                coming[0].wait()
                coming.popleft()
            if group.rank + 1 < group.size:
                if len(sent) >= _IN_FLIGHT:
                    sent[0].wait()
                    sent.popleft()
                sent.append(group.start_send(pieces[key], group.rank + 1))
            arrived[key].set_result(True)
        while sent:
            sent[0].wait()
            sent.popleft()

    def _choose(self, keys: Sequence[str], chosen: Collection[str], sent: deque[Work]) -> list[str]:
        """Return those of the keys that the first member has chosen, and tell the next member along the
        chain.
        """
        group, mask = self._group, torch.tensor([key in chosen for key in keys], dtype=torch.uint8)
        if group.rank:
            group.start_receive(mask, group.rank - 1).wait()
        if group.rank + 1 < group.size:
            sent.append(group.start_send(mask, group.rank + 1))
        return [key for key, wanted in zip(keys, mask.tolist(), strict=True) if wanted]

    def finish(self) -> None:
        """Wait until what has come is passed on. Other members' failures end that, too."""
        wait_for(self._running, _END_SECONDS)

    def end(self) -> None:
        """Shut the group, and return when nothing of it is under way any more."""
        self._group.shut()
        self._thread.shutdown(wait=False)
        wait_for(self._running, _END_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether everything that was begun is over."""
        return all(job.done() for job in self._running)


def _end(*works: Work) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()


def scratch_for(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory to receive into: what comes late must not overwrite the model."""
    return [torch.empty(value.shape, dtype=value.dtype) for value in values]
