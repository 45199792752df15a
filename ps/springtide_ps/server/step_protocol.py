"""Which steps a server makes, in synchronous training: the rules alone, without tensors. PURE.

A step goes through three words of every member: its gradients are *staged* here, it has *prepared* (all of
them are), it has *committed*. A member prepares on all servers before it enters the step's commit vote,
and commits after it; so whoever commits a step knows that every server holds all gradients of it, and a
server that has heard every member commit knows that nobody will ever go back behind it. That is why a server
keeps one version: a step that some members have committed and some servers have not made is made in the next
generation, because the greatest state of the survivors names it; but only once all its members hold that
state (`resolve`), for until then the only one that knows of it may die. Any other staged step is dropped.

A member may need the new values before its body ends (for an average of weights) when another one, which has
not committed yet, is dead; and until that body has ended no generation can follow. For such a member a server
*tries* the step that it has committed: it makes it, and keeps the values and the optimizer's state from
before until the next generation is settled, which begins from either.

Where members do not step together, each chunk says which batches are in it (`applied.AppliedBatches`), and
`version` is 0. Exactly the batches 0..n-1 and version n mean the same, so a generation of the other kind
turns one into the other on entering, each server by itself and as often as generations change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from springtide_ps.params.chunk import BACKWARD_PASSES_LIMIT, StepSpec

Token = tuple[int, int, int]
"""(incarnation, restart, generation): who may speak. The greatest one that was heard is the present one."""

MEMBERS_LIMIT: Final = 65536


class StepProtocolError(ValueError):
    """A request that does not belong to the present step."""


class NoRoomError(StepProtocolError):
    """More memory would be needed than the server may take."""


class StaleError(StepProtocolError):
    """The request comes from a generation that is over."""


class Effect(Enum):
    """An instruction to the store: a change to the shards that follows from a request."""

    FENCE = auto()  # refuse whoever waits: its generation is over
    DROP = auto()  # forget the staged step
    APPLY = auto()  # make the staged step with `step_spec` for good; `version` counts it already
    TRY = auto()  # make the staged step with `step_spec`, and keep what was before it
    ROLL_BACK = auto()  # go back to what was before the tried step
    FORGET = auto()  # forget all chunks: they belong to another state
    PREPARED = auto()  # all gradients of the step are here
    BEGIN_APPLIED_BATCHES = auto()  # each chunk says from now on which batches it has
    COUNT = auto()  # chunks with exactly the batches 0..version-1 are at `version`; others are of no use


@dataclass
class StepProtocol:
    """version: the step whose values this server holds. run_id: names the run of training that they belong
    to, so that a step number of another one is never taken for it.
    """

    token: Token | None = None
    run_id: str = ""
    version: int = 0
    members: frozenset[str] = frozenset()
    step_spec: StepSpec | None = None
    staged: dict[str, set[str]] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    complete: bool = False
    """Whether all gradients of the backward pass are here."""
    backward_pass: int = 0
    """Number of the pass in its step, from 0: `staged`, `prepared` and `complete` are of this one; those
    before are complete.
    """
    tried: bool = False
    """Whether the values of step `version` + 1 are here too."""
    in_batches: bool = False
    """Whether chunks count batches, and no steps are counted."""
    unresolved: int | None = None
    """The step that the generation begins from, while this server still has to be told how to make it."""

    def enter(
        self,
        token: Token,
        members: Collection[str],
        step: int,
        run_id: str,
        in_batches: bool = False,
    ) -> list[Effect]:
        """Have a member that holds the state after a step begin the generation from it.

        Args:
            token: the generation's.
            members: ids of all its members.
            step: the step; 0 where they do not step together.
            run_id: of the state's history; all that is held of another one is forgotten.
            in_batches: its members do not step together.

        Returns:
            The effects that the caller carries out.

        Raises:
            StaleError: a newer generation has begun.
        """
        self._refuse_older(token)
        effects: list[Effect] = []
        if self.token is None or token > self.token:
            effects.append(Effect.FENCE)
            self.token, self.members, self.unresolved = token, frozenset(members), None
            effects += self._begin_from(step, run_id, in_batches)
        return effects

    def resolve(self, token: Token, step_spec: StepSpec | None) -> list[Effect]:
        """Decide the open step, since all members of the generation hold the state that it begins from.

        Args:
            token: the generation's.
            step_spec: how the step is made; None: the caller does not know.

        Returns:
            The effects that the caller carries out.

        Raises:
            StepProtocolError: it is needed, and not given.
        """
        self.check_token(token)
        if self.unresolved is None:
            return []
        if step_spec is None:
            raise StepProtocolError(f"step {self.unresolved} is still to be made here, and nobody says how")
        self.version, self.step_spec, self.unresolved = self.unresolved, step_spec, None
        self._clear()
        return [Effect.APPLY]

    def _begin_from(self, step: int, run_id: str, in_batches: bool) -> list[Effect]:
        was_in_batches, self.in_batches = self.in_batches, in_batches
        undone = [Effect.ROLL_BACK] if self.tried else []
        if run_id == self.run_id and in_batches is not was_in_batches:
            self.version = 0 if in_batches else step
            self._clear()
            # The staged step is in no chunk: each one says which batches it has.
            return [*undone, Effect.BEGIN_APPLIED_BATCHES] if in_batches else [Effect.COUNT]
        if run_id == self.run_id and step == self.version:
            self._clear()
            return [*undone, Effect.DROP]
        if run_id == self.run_id and step == self.version + 1 and self.complete:
            self.unresolved = step
            return []
        self.run_id, self.version = run_id, step
        self._clear()
        return [Effect.FORGET]

    def stage(self, token: Token, step: int, member: str, key: str, number: int = 0) -> bool:
        """Note that a gradient of a chunk has come.

        Args:
            token: the generation's.
            step: its number.
            member: the sender.
            key: the chunk's.
            number: of the backward pass.

        Returns:
            True: it is the first one of this backward pass.

        Raises:
            StepProtocolError: it does not belong here, above all a second one of the same member.
        """
        self._check(token, step, member)
        self._reach(number, member)
        if member in self.prepared:
            raise StepProtocolError(f"{member} has prepared step {step} and sends more of it")
        who = self.staged.setdefault(key, set())
        if member in who:
            raise StepProtocolError(f"{member} sends its gradient of {key} for step {step} twice")
        who.add(member)
        return len(who) == 1

    @property
    def size(self) -> int:
        """How many members the generation has."""
        return len(self.members)

    def prepare(self, token: Token, step: int, member: str, count: int, number: int = 0) -> list[Effect]:
        """Note that a member has sent all gradients of a backward pass.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            count: of gradients that it has sent to this server.
            number: of the backward pass.

        Returns:
            The effects that the caller carries out.

        Raises:
            StepProtocolError: another number of gradients has come.
        """
        self._check(token, step, member)
        self._reach(number, member)
        found = sum(member in who for who in self.staged.values())
        if found != count:
            raise StepProtocolError(f"{member} has sent {found} gradients of step {step} and says {count}")
        self.prepared.add(member)
        self.complete = self.prepared == self.members
        return [Effect.PREPARED] if self.complete else []

    def commit(self, token: Token, step: int, member: str, step_spec: StepSpec) -> list[Effect]:
        """Note that a member has committed the step, which is made when all have.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            step_spec: how the step is made.

        Returns:
            The effects that the caller carries out.

        Raises:
            StepProtocolError: some member has not prepared it.
        """
        self._check(token, step, member)
        if not self.complete:
            missing = ", ".join(sorted(self.members - self.prepared))
            raise StepProtocolError(f"{member} commits step {step}, which {missing} did not prepare")
        self.check_substeps(token, step, member, step_spec)
        self.committed.add(member)
        self.step_spec = step_spec
        if self.committed != self.members:
            return []
        self.version = step
        self._clear()
        return [Effect.APPLY]

    def check_substeps(self, token: Token, step: int, member: str, step_spec: StepSpec) -> None:
        """Refuse a member's report of substeps unless all their gradients are here.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            step_spec: the substeps.

        Raises:
            StepProtocolError: gradients are missing.
        """
        self._check(token, step, member)
        there = self.backward_pass if self.complete else self.backward_pass - 1
        if beyond := [part.backward_pass for part in step_spec.substeps if part.backward_pass > there]:
            raise StepProtocolError(
                f"{member} makes backward pass {beyond[0]} of step {step}, which not all have prepared"
            )

    def _reach(self, number: int, member: str) -> None:
        """Begin the next backward pass of the step when it is this one's turn.

        Raise StepProtocolError if it is not.
        """
        if number == self.backward_pass:
            return
        if number != self.backward_pass + 1 or not self.complete or number >= BACKWARD_PASSES_LIMIT:
            raise StepProtocolError(
                f"{member} is in backward pass {number} of the step, and this server in {self.backward_pass};"
                f" there are at most {BACKWARD_PASSES_LIMIT}"
            )
        if self.committed:
            raise StepProtocolError(f"{member} goes on with a step that {min(self.committed)} has committed")
        self.backward_pass, self.staged, self.prepared, self.complete = number, {}, set(), False

    def try_step(self, token: Token, step: int, member: str) -> list[Effect]:
        """Have a step made for now that a member has committed, and whose values it needs.

        Args:
            token: the generation's.
            step: its number.
            member: its id.

        Returns:
            The effects that the caller carries out.

        Raises:
            StepProtocolError: the member has not committed it.
        """
        self.check_token(token)
        if step == self.version or (self.tried and step == self.version + 1):
            return []
        self._check(token, step, member)
        if member not in self.committed:
            raise StepProtocolError(f"{member} needs step {step}, which it has not committed")
        self.tried = True
        return [Effect.TRY]

    def may_fetch(self, token: Token, step: int) -> None:
        """Refuse a question for values that are not here and will not be.

        Args:
            token: the generation's.
            step: the step after which they are wanted.

        Raises:
            StepProtocolError: the step is another than the last one and the next.
        """
        self.check_token(token)
        if step not in (self.version, self.version + 1):
            raise StepProtocolError(
                f"the values after step {step} are asked for, and those after {self.version} held"
            )

    def check_vote(self, token: Token, step: int, member: str) -> None:
        """Refuse a report unless it is a member's on the present step.

        Args:
            token: the generation's.
            step: its number.
            member: its id.

        Raises:
            StepProtocolError: it is not.
        """
        self._check(token, step, member)

    def check_token(self, token: Token) -> None:
        """Raise StaleError, or StepProtocolError for a generation that has not entered."""
        self._refuse_older(token)
        if token != self.token:
            raise StepProtocolError(f"generation {token} has not entered")

    @property
    def ready(self) -> bool:
        """Whether the state that the generation begins from is settled."""
        return self.token is not None and self.unresolved is None

    def _check(self, token: Token, step: int, member: str) -> None:
        self.check_token(token)
        if not self.ready:
            raise StepProtocolError("the generation's state is not settled yet")
        if member not in self.members:
            raise StepProtocolError(f"{member} is no member of generation {token}")
        if step != self.version + 1:
            raise StepProtocolError(f"a word on step {step}, and this server is at {self.version}")

    def _refuse_older(self, token: Token) -> None:
        if self.token is not None and token < self.token:
            raise StaleError(f"generation {token} is over: {self.token} is the present one")

    def _clear(self) -> None:
        self.staged, self.prepared, self.committed = {}, set(), set()
        self.complete = self.tried = False
        self.backward_pass = 0
