"""Compare what must be equal on all members, and say who is to be sent it again.

Members that step together compare a piece in the commit vote of every few steps (`vote_digest`,
`vote_copies`, `after_vote`), and all of it before a state is saved and where a loop ends (`compare`). All
learn alike what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from springtide.comm.process_group import Group
from springtide.pods.pod import Pod
from springtide.sharding.copies import CopyDigest, Difference
from springtide.train_step.buffers import Buffers
from springtide.train_step.replica_digest import (
    ReplicaDigest,
    balance_in_row,
    digest_of,
    odd_ones,
    odd_pods,
)

MOST_SENT = 3  # times that a member is sent the state again since it has drifted

Total = Callable[[torch.Tensor], object]
"""Replaces a float64 tensor by its sum over the members, which all call it alike."""


@dataclass(frozen=True, slots=True)
class Found:
    """Differences between the members, as a comparison has found them.

    Attributes:
        odd: ranks of members whose parameters are not those of most.
        names: parameters and buffers among which the difference is.
        differences: of copies of shards.
        mends: whether a member is sent the state, or shards, again.
    """

    odd: Sequence[int] = ()
    names: Sequence[str] = ()
    differences: Sequence[Difference] = ()
    mends: bool = False


class Replicas:
    """One member's side of the comparisons. Used from the script's thread."""

    def __init__(
        self,
        buffers: Buffers,
        digest: ReplicaDigest | None,
        copies: CopyDigest | None,
        pod: Pod | None = None,
    ) -> None:
        """Compare nothing yet.

        Args:
            buffers: of the model, which are compared with the parameters unless they are each member's own.
            digest: of the parameters; None where they are not the same on all members.
            copies: of shards, each of which two members hold; None where there are none.
            pod: whose processes hold parts, which are compared over those of one local rank.
        """
        self._pod = pod
        self._buffers, self._digest, self._copies = buffers, digest, copies
        self._sent_again = 0
        self.drifted = False
        """Whether this member's parameters are not those of most others, and it is to be sent the state."""

    def vote_digest(self, number: int) -> int:
        """Return the hash that this member puts into the vote of a step; 0 in most, where none is due."""
        return 0 if self._pod is not None else self._hash(number)

    def _hash(self, number: int) -> int:
        if self._digest is None or not self._digest.due(number):
            return 0
        return self._digest.hash(number, self._compared(self._buffers.committed))

    def _compared(self, values: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that are compared, by name.

        Args:
            values: of all of them.
        """
        return [] if self._pod is not None else self._buffers.shared(values)

    def vote_copies(self, number: int, rank: int) -> int:
        """Return what is 0 in sum where all copies are equal: of shards, or of parts in the pods' processes.

        It is 0 in most steps, where none is due.

        Args:
            number: of the step.
            rank: of this member.
        """
        if self._pod is not None:
            grid = self._pod.grid
            if grid is None or grid.pods == 1:
                return 0
            return balance_in_row(self._hash(number), grid.pod, grid.pods)
        if self._copies is None or not self._copies.due(number):
            return 0
        return self._copies.balance(number, rank)

    def after_vote(self, number: int, digest: int, group: Group, total: Total) -> Found:
        """Find out what differs, since the members' votes did not fit. All members call it alike.

        Args:
            number: of the step.
            digest: that this member has put into the vote.
            group: of the members.
            total: sums over them.
        """
        if self._pod is not None:
            return self._find_odd_pods(number, self._pod, total)
        if self._copies is not None:
            return self._find_differences(self._copies, group, total)
        assert self._digest is not None
        names = self._digest.names(number, self._compared(self._buffers.committed))
        return self._find_odd([digest], [names], group, total)

    def compare(self, group: Group, total: Total) -> Found:
        """Compare all of the committed state, between two steps. All members call it alike.

        It takes one reading of the parameters and buffers (of the shards that are held here), and one sum of
        two numbers.

        Args:
            group: of the members.
            total: sums over them.
        """
        if group.size == 1 or self._pod is not None:
            return Found()
        if self._copies is not None:
            return self._find_differences(self._copies, group, total)
        if self._digest is None:
            return Found()
        buffers = self._compared(self._buffers.current())
        hashes = self._digest.hashes(buffers)
        own = digest_of([torch.tensor(hashes)])
        sums = torch.tensor([own, own**2], dtype=torch.float64)
        total(sums)
        if group.size * int(sums[1]) == int(sums[0]) ** 2:
            return Found()
        names = [self._digest.names_in(piece, buffers) for piece in range(len(hashes))]
        return self._find_odd(hashes, names, group, total)

    def _find_odd_pods(self, number: int, pod: Pod, total: Total) -> Found:
        """Find the pods in which a process has another part, and have those be sent the state as wholes.

        Args:
            number: of the step.
            pod: of this process.
            total: sums over all members.
        """
        assert pod.grid is not None
        assert self._digest is not None
        told = torch.zeros(2, pod.processes, pod.grid.pods, dtype=torch.float64)
        hashed = torch.tensor([self._hash(number), self._sent_again], dtype=torch.float64)
        told[:, pod.local_rank, pod.grid.pod] = hashed
        total(told)
        hashes, sent_again = told.to(torch.int64).tolist()
        odd = odd_pods(hashes)
        mends = any(sent_again[0][other] < MOST_SENT for other in odd)
        if mends and pod.grid.pod in odd and self._sent_again < MOST_SENT:
            self._sent_again += 1
            self.drifted = True
        return Found([pod.grid.row[other] for other in odd], self._digest.names(number), (), mends)

    def _find_odd(
        self, hashes: Sequence[int], names: Sequence[Sequence[str]], group: Group, total: Total
    ) -> Found:
        """See whose hashes differ, and have those members be sent the state again, if that helps.

        Args:
            hashes: of this member, by piece.
            names: of what is in each piece.
            group: of the members.
            total: sums over them.
        """
        told = torch.zeros(group.size, len(hashes) + 1, dtype=torch.float64)
        told[group.rank] = torch.tensor([*hashes, self._sent_again], dtype=torch.float64)
        total(told)
        rows = [tuple(row[:-1]) for row in told.to(torch.int64).tolist()]
        odd = odd_ones(rows)
        differ = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
        among = [name for some, is_other in zip(names, differ, strict=True) if is_other for name in some]
        # One that has been sent it before computes otherwise, and would be sent it for ever.
        mends = any(int(told[rank, -1]) < MOST_SENT for rank in odd)
        if mends and group.rank in odd and self._sent_again < MOST_SENT:
            self._sent_again += 1
            self.drifted = True
        return Found(odd, list(dict.fromkeys(among)), (), mends)

    def _find_differences(self, copies: CopyDigest, group: Group, total: Total) -> Found:
        """See which copies of shards differ, and have the buddies be sent the owners', if that helps.

        Nobody can tell which of two copies is right. The owner's values are those of all other members, so
        its copy counts.
        """
        sent_again = torch.zeros(group.size, dtype=torch.float64)
        sent_again[group.rank] = self._sent_again
        table = copies.table(group.rank)
        told = torch.cat((sent_again, table.reshape(-1)))
        total(told)
        differences = copies.differences(told[group.size :].view(table.shape))
        # One that has been sent them before computes otherwise, and would be sent them for ever.
        mended = [found for found in differences if told[found.buddy] < MOST_SENT]
        if mended:
            copies.doubt(mended, group.rank)
            self._sent_again += any(found.buddy == group.rank for found in mended)
        return Found((), (), differences, bool(mended))
