"""Faults from a seed on the parameter servers of a job, beside those on workers and coordinator.

Where each part of the parameters is on two servers, one server at a time may be killed, stopped, replaced or
taken away; the next one only when the coordinator has said, after that, that all copies are there. Without
copies there has to be a checkpoint. From version 3 of the seeds on, the manifest of some jobs changes its
consistency meanwhile. From version 5 on, the line to a server is cut for a while, for all workers and the
other servers, or for one worker: with copies it may be replaced for that, without them it is waited for.
"""

from __future__ import annotations

import math
import time

from chaos_seeds import Seed
from cut_proxy import CutProxy, ports_of
from worker_chaos import Chaos
from worker_cluster import ServerPod, Worker, WorkerCluster

from springtide_protocol import coordinator_pb2 as pb

MOST_SERVERS = 3
CUTS_FROM = 5
"""The first version of the seeds that cuts lines."""
_DEEDS_1 = ("kill", "kill", "kill", "stop", "more", "fewer")
_DEEDS_5 = (*_DEEDS_1, "cut", "cut", "cut", "cut")
_PORT = 7080  # of servers
_FIRST_FRONT = 150  # last byte of the first proxy's address, between workers' and servers'
_HEARD_SECONDS = 0.5
"""Time after the last deed from which the coordinator's word is believed."""
_CONSISTENCIES = (
    pb.Consistency(mode="Synchronous", staleness=4),
    pb.Consistency(mode="BoundedStaleness", staleness=1),
    pb.Consistency(mode="BoundedStaleness", staleness=4),
    pb.Consistency(mode="Asynchronous", staleness=4),
)


def deeds(version: int) -> tuple[str, ...]:
    """Return the faults of servers that seeds of this version draw from."""
    return _DEEDS_5 if version >= CUTS_FROM else _DEEDS_1


class ServerChaos(Chaos):
    """Chaos that adds faults of servers to those of workers.

    Args:
        switches: also change the job's consistency.
    """

    kind = "servers"

    def __init__(self, cluster: WorkerCluster, seed: Seed, copies: int = 2, switches: bool = False) -> None:
        super().__init__(cluster, seed)
        self._copies, self.switches = copies, switches
        self._last_deed = time.monotonic()
        self._wake_server: tuple[float, ServerPod] | None = None
        self._replace: tuple[float, int] | None = None
        self._retired: list[ServerPod] = []
        self._fronts: list[CutProxy] = []  # of each server, in the order of their making
        self._line: tuple[float, ServerPod] | None = None  # that is cut, until then
        if seed.version >= CUTS_FROM:
            cluster.front_of = self._fronted

    def strike(self) -> None:
        super().strike()
        if self.cluster.finished():
            return
        if self.switches and self.random.random() < 0.2:
            self._switch()
        self._mend_line(time.monotonic())
        self._mend_servers(time.monotonic())
        if self._whole():
            self._bury()
            if self.random.random() < 0.6:
                self._hurt_server()

    def heal(self) -> None:
        """Mend the faults of workers and servers, but leave a cut line to its drawn time.

        Only a line that stays cut makes the others cut a server off.
        """
        super().heal()
        self._mend_servers(math.inf)

    def end(self) -> None:
        self._mend_line(math.inf)
        super().end()

    def close(self) -> None:
        super().close()
        for front in self._fronts:
            front.close()

    def is_over(self) -> bool:
        """Whether the anchor has ended; until then servers that end are replaced, and the line is mended."""
        self._mend_line(time.monotonic())
        self._mend_servers(time.monotonic())
        return not self.anchor.running

    def draw_fault(self) -> str:
        """Draw a fault of a worker, where consistency changes often one in the middle of a push.

        Some chunks then have the batch, and others do not.
        """
        if self.switches and self.random.random() < 0.3:
            return f"pushing:*:{self.random.choice(('kill', 'kill', 'raise', 'sleep=0.4'))}"
        return super().draw_fault()

    def _cut(self, victim: Worker) -> None:
        """Cut off a worker that is not the anchor.

        Once others have gone on without the anchor, their death would lose the state.
        """
        if victim is not self.anchor:
            super()._cut(victim)

    def _switch(self) -> None:
        wanted = self.cluster.consistency
        chosen = self.random.choice([other for other in _CONSISTENCIES if other.mode != wanted.mode])
        self.cluster.train_in(chosen)
        self._say(f"consistency {chosen.mode} {chosen.staleness}")

    def _whole(self) -> bool:
        """Whether all copies are there, by a word that is newer than the last deed."""
        if self._wake_server is not None or self._replace is not None or self._coordinator_at is not None:
            return False
        if self._line is not None:
            return False
        reply, asked = self.cluster.reply, self.cluster.asked_at
        if self._copies == 1 and (reply is None or not reply.checkpoint.name):
            return False
        return reply is not None and reply.servers_settled and asked > self._last_deed + _HEARD_SECONDS

    def _hurt_server(self) -> None:
        cluster, now = self.cluster, time.monotonic()
        self._last_deed = now
        deed = self.random.choice(deeds(self.version))
        if deed == "more" and cluster.servers_wanted < MOST_SERVERS:
            cluster.add_server(cluster.servers_wanted)
            cluster.servers_wanted += 1
            self._say(f"{cluster.servers_wanted} servers")
        elif deed == "fewer" and cluster.servers_wanted > 2:
            cluster.servers_wanted -= 1
            slot = cluster.servers_wanted
            self._retired += [server for server in cluster.servers if server.running and server.slot == slot]
            self._say(f"{cluster.servers_wanted} servers")
        else:
            chosen = [s for s in cluster.servers if s.running and s.slot < cluster.servers_wanted]
            victim = self.random.choice(chosen)
            if deed == "cut":
                self._cut_line(victim)
            elif deed == "stop":
                self._say(f"stop {victim.name}")
                victim.stop()
                self._wake_server = now + self.random.choice((0.2, 1.0, 3.0)), victim
            else:
                self._say(f"kill {victim.name}")
                victim.kill()
                self._replace = now + self.random.choice((0.0, 0.3, 1.0)), victim.slot

    def _cut_line(self, victim: ServerPod) -> None:
        """Cut a server off from all workers, or from one that is not the anchor.

        A worker that alone does not reach a server is itself cut off from the job.
        """
        front = self._fronts[self.cluster.servers.index(victim)]
        reset = self.random.random() < 0.3
        others = [w for w in self.cluster.workers if w.running and w is not self.anchor]
        one = self.random.choice(others) if others and self.random.random() < 0.35 else None
        # Shorter than the limit of silence, longer, and long enough for the server to be cut off.
        lasts = self.random.choice((0.5, 3.0, 10.0))
        how = "reset" if reset else "silent"
        self._say(f"cut {one.name if one else 'all'} off {victim.name}, {how}, {lasts:g} s")
        front.cut(None if one is None else lambda port: port in ports_of(one.pid), reset=reset)
        self._line = time.monotonic() + lasts, victim

    def _fronted(self, slot: int, address: str) -> str:
        seen = f"{self.cluster.net}.{_FIRST_FRONT + len(self._fronts)}"
        self._fronts.append(CutProxy((address, _PORT), (seen, _PORT), holds_ends=True))
        return seen

    def _mend_line(self, now: float) -> None:
        if self._line is not None and (self._line[0] <= now or not self._line[1].running):
            self._fronts[self.cluster.servers.index(self._line[1])].heal()
            self._say(f"{self._line[1].name} is reached again")
            self._line, self._last_deed = None, time.monotonic()

    def _mend_servers(self, now: float) -> None:
        if self._wake_server is not None and self._wake_server[0] <= now:
            self._wake_server[1].wake()
            self._wake_server, self._last_deed = None, time.monotonic()
        there = {server.slot for server in self.cluster.servers if server.running}
        missing = sorted(set(range(self.cluster.servers_wanted)) - there)
        if missing and self._replace is None:
            self._replace = now, missing[0]
        if self._replace is not None and self._replace[0] <= now:
            server = self.cluster.add_server(self._replace[1])
            self._replace, self._last_deed = None, time.monotonic()
            self._say(f"add {server.name}")

    def _bury(self) -> None:
        """Servers that nobody needs go, as the operator has it."""
        for server in self._retired:
            server.kill()
        self._retired = []
