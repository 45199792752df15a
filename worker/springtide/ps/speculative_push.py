"""A batch's values asked for while its gradients leave, where workers do not wait for each other.

As in common steps (`speculative_pull`), how the push will count a gradient is mostly known when it leaves: as
the last one did, with the options of now. So the early push says it, and the server answers with what the
chunk is with it then. Those values land beside the parameters, and are used when the body is committed just
so. The push then says how it counts, as always, and is answered without values: so updates of others that
come between both are in the next values only. Where that is not allowed, with a bound on staleness, and where
the norm of all gradients matters, nothing is asked for early.

The script's thread makes all calls, but for `send`: of parameters on a device that comes from the thread of
`HostMemory`, for which the body waits before it commits. No lock is held.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.early_push import EarlyPush, Outgoing
from springtide.ps.sharding import PlannedChunk
from springtide.ps.speculative_pull import SpeculativeValues
from springtide_ps.params.chunk import StepSpec
from springtide_ps.wire.client import Answer, RefusedError
from springtide_ps.wire.frames import Kind


class SpeculativePush:
    """Early pushes whose answers bring values back.

    Args:
        context: of the process.
        values: where they land, and when they may.
    """

    def __init__(self, context: PsContext, values: SpeculativeValues) -> None:
        self._context, self._values = context, values
        self.bare: set[str] = set()
        """Chunks whose push is answered without values."""
        self._came: dict[str, Future[Answer]] = {}

    @property
    def open(self) -> bool:
        """Whether values were asked for that have not been taken."""
        return bool(self._came)

    def end_generation(self) -> None:
        """Wait for nothing any more; what was asked for may still land beside the parameters."""
        self.release()
        self._values.abandon()

    def release(self) -> None:
        """Take no values of the last body: newer ones are asked for."""
        for key, future in self._came.items():
            self._values.keep(key, future)
        self._came = {}

    def begin_step(self, last: StepSpec | None) -> None:
        """Begin a body. last: how the one before was pushed; None: nothing is to be asked for in this one."""
        step = self._context.generation.step + 1
        self._values.begin(step, last, lambda: self._context.optimizers.options)

    def give_up(self) -> None:
        """The body goes on after its first gradients: its pushes are answered with values."""
        self.bare = set()
        self._values.stop()

    def send(
        self,
        chunk: PlannedChunk,
        gradient: Outgoing,
        early_push: EarlyPush,
        count: Callable[[StepSpec], dict[str, Any]],
    ) -> bool:
        """Push a chunk's gradient early, and ask for its values with it.

        Args:
            chunk: The gradient's chunk.
            gradient: The form in which it travels.
            early_push: Of the running body.
            count: Says how the push will count it.

        Returns:
            False: nothing is to be asked for, and it was not pushed.

        Raises:
            ServerError: The connection is broken.
        """
        expected = self._values.expect(chunk)
        if expected is None:
            return False
        step_spec, out = expected
        context = self._context
        server, token = context.generation.homes[chunk.key][0], context.generation.start.token
        answer = early_push.send_speculatively(
            lambda about, payload: context.connections.ask(
                server, Kind.SPECULATIVE_PUSH, token, about, payload, out
            ),
            chunk.key,
            gradient,
            count(step_spec),
        )
        self._values.asked(chunk.key, server, answer)
        return True

    def commit(self, step_spec: StepSpec) -> None:
        """The body is committed like this, and its pushes are about to leave."""
        asked = self._values.commit(self._context.generation.step + 1, step_spec)
        self._came = {key: future for key, (future, _) in asked.items()}
        self.bare = set(asked)

    def receive(self, key: str, to_the_end: bool) -> dict[str, Any] | None:
        """Wait for a chunk's values that were asked for early.

        Args:
            key: The chunk's; among those that `asked_for` says.
            to_the_end: Wait also when the generation is over.

        Returns:
            The server's description of them; None: it has none, since the push comes
            first; call `replaced` then, and take the values from the push.

        Raises:
            ServerError: They do not come.
        """
        context, early = self._context, self._came[key]
        try:
            said: dict[str, Any] = context.connections.answer(
                early, context.generation.homes[key][0], context.awaited(key), to_the_end
            ).meta
        except ServerError:
            if not early.done() or not isinstance(early.exception(), RefusedError):
                raise
            return None
        if said.get("late"):
            return None
        self._values.take(context.sharding.by_key[key])
        del self._came[key]
        return said

    def asked_for(self, key: str) -> bool:
        """Whether a chunk's values are to come from what was asked for early."""
        return key in self._came

    def replaced(self, key: str) -> None:
        """A chunk's values are asked for once more, after its push."""
        self.bare.discard(key)
        del self._came[key]
