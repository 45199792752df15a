"""A range's values asked for while its gradients leave, where workers do not wait for each other.

As in common steps (`early`), how the push will count a gradient is mostly known when it leaves: as the last
one did, with the options of now. So the offer says it, and the server answers with what the chunk is with it
then. Those values land beside the parameters, and are used when the body is committed just so. The push then
says how the offer counts, as always, and is answered without values: so updates of others that come between
offer and push are in the next values only. Where that is not allowed, with a bound on staleness, and where
the norm of all gradients matters, nothing is asked for early.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from springtide.ps.connections import ServerError
from springtide.ps.early_push import Outgoing
from springtide.ps.sharding import PlannedChunk
from springtide.servers.asynchronous import AsynchronousExchange
from springtide.servers.early import EarlyExchange
from springtide_ps.chunk import Recipe
from springtide_ps.client import RefusedError
from springtide_ps.frames import Kind


class EarlyRanges(AsynchronousExchange, EarlyExchange):
    """As `AsynchronousExchange`, in generations whose members do not step together."""

    rounds = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._bare: set[str] = set()  # chunks whose push is answered without values
        self._saw_ahead = False

    def _await_late(self) -> None:
        super()._await_late()
        self._bare = set()

    def _lands(self, key: str) -> bool:
        return key not in self._bare

    def refresh(self) -> None:
        for key, future in self._came_early.items():
            self._early.keep(key, future)
        self._came_early = {}
        super().refresh()

    def begin_step(self) -> None:
        self._saw_ahead = bool(self._ahead_of_end)
        super().begin_step()

    def _last_made(self) -> Recipe | None:
        if not self.asynchronous:
            return super()._last_made()
        if self._saw_ahead or self._entered.bound is not None or not self._wants_early:
            return None  # or what is seen within a body is pushed then
        return self._recipe

    def begin_round(self) -> None:
        self._give_up_early()
        super().begin_round()

    def _push_staged(self) -> None:
        if self.optimizers.staged:
            self._give_up_early()
        super()._push_staged()

    def _give_up_early(self) -> None:
        """The body goes on after its first gradients: its pushes are answered with values."""
        self._bare = set()
        self._early.stop()

    def _offer(self, chunk: PlannedChunk, gradient: Outgoing) -> None:
        expected = self._early.expect(chunk)
        if expected is None:
            super()._offer(chunk, gradient)
            return
        recipe, out = expected
        server, token = self._homes[chunk.key][0], self._entered.token
        count = {
            "r": self._leased,
            "recipe": self._own(recipe, chunk.key).to_json(),
            **self._wanted(chunk.key),
        }
        answer = self._offering.ask_early(
            lambda about, payload: self.links.ask(server, Kind.OFFER_EARLY, token, about, payload, out),
            chunk.key,
            gradient,
            count,
        )
        self._early.asked(chunk.key, server, answer)

    def _decided(self) -> None:
        asked = self._early.commit(self._step + 1, self._recipe)
        self._came_early = {key: future for key, (future, _) in asked.items()}
        self._bare = set(asked)

    def _wanted(self, key: str) -> dict[str, Any]:
        return {"bare": True} if key in self._bare else super()._wanted(key)

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """As in `AsynchronousExchange`; answers without values are taken when they are there."""
        for key in self._bare & self._clean & self._fetches.keys():
            if self._fetches[key][0].done():
                self._receive(key, to_the_end)
        super().settle(parameters, to_the_end)

    def _take_answers(self, to_the_end: bool) -> None:
        for key in self._bare & self._fetches.keys():
            self._receive(key, to_the_end)

    def _receive(self, key: str, to_the_end: bool) -> None:
        early = self._came_early.get(key)
        if early is None:
            super()._receive(key, to_the_end)
            return
        server = self._homes[key][0]
        try:
            said = self.links.answer(early, server, self._values_of(key), to_the_end).meta
        except ServerError:
            if not early.done() or not isinstance(early.exception(), RefusedError):
                raise
            said = {"late": True}
        if not said.get("late"):
            self._early.take(self._chunks[key])
            self._note_pulled(key, said)
            del self._came_early[key]
            return
        super()._receive(key, to_the_end)  # the push, after which the values are asked for
        about = {"k": key, "rank": self._ranks[key]}
        pull = self._ask(server, Kind.PULL_CHUNK, about, out=self._values(self._chunks[key]))
        self._fetches[key] = pull, server
        self._bare.discard(key)
        del self._came_early[key]
        super()._receive(key, to_the_end)
