"""Faults from a seed on the workers and the coordinator of one job, and what survives them.

One worker, the anchor, is spared everything that would lose the job's last state; which one it is, the seed
decides. Everything else may be killed, stopped, cut off, told to leave, broken at a named point, joined by
others and left without a coordinator, several at once.
"""

from __future__ import annotations

import random
import time
from typing import Any

from chaos_points import chance_of_any_step, points
from chaos_seeds import Seed
from cut_proxy import CutProxy
from worker_checks import check
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference

MOST_WORKERS = 5
SPEED_FROM = 7
"""The first version of the seeds of which some have parts by speed."""
FOLLOW_FROM = 9
"""The first version of the seeds in whose jobs joiners take the state beside training."""
_ACTIONS = ("kill", "kill", "stop=0.3", "stop=3", "raise", "term", "sleep=0.4")


def speed_of(seed: Seed) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options and environment that have every second seed's job cut its batches by speed.

    Its workers take 2, 4 or 6 ms a sample.

    Args:
        seed: of the job.
    """
    if seed.version < SPEED_FROM or seed.number % 2 == 0:
        return {}, {}
    speeds = {str(slot): 0.002 * (1 + slot % 3) for slot in range(64)}
    return {"sample_seconds": speeds, "pace": 0}, {"SPRINGTIDE_BALANCE": "Speed"}


def follow_of(seed: Seed) -> dict[str, str]:
    """Return the environment in which joiners of a seed's job follow before they are members.

    Args:
        seed: of the job.
    """
    return {"SPRINGTIDE_FOLLOW_MIB": "0"} if seed.version >= FOLLOW_FROM else {}


class Chaos:
    """`strike` does one thing; `heal` ends all that lasts. `log` tells what was done, to be read."""

    kind = "workers"
    """Name of a kind of `chaos_points`."""

    def __init__(self, cluster: WorkerCluster, seed: Seed) -> None:
        self.random = random.Random(seed.number)
        self.version = seed.version
        self.cluster = cluster
        self.log: list[str] = []
        self.proxies: dict[str, CutProxy] = {}
        self._wake_at: dict[str, float] = {}
        self._heal_at: dict[str, float] = {}
        self._coordinator_at: float | None = None
        self._began = time.monotonic()
        cluster.coordinator_of = self._proxied
        cluster.over_when_finished = True
        cluster.stands_still = False

    def begin(self) -> None:
        """Start the job with three workers, of which one is the anchor."""
        faults = {number: self.draw_fault() for number in range(3) if self.random.random() < 0.6}
        anchor = self.random.randrange(3)
        faults.pop(anchor, None)
        self._say(f"anchor worker-{anchor}, faults {faults}")
        # Whose values the job begins with is open when the first worker may die before the first commit.
        options = {"same_start": True} if any(":*:" in fault for fault in faults.values()) else {}
        self.anchor = self.cluster.start(3, faults=faults, options=options)[anchor]

    def strike(self) -> None:
        self._mend(time.monotonic())
        if self.cluster.finished():
            return
        others = [w for w in self.cluster.workers if w.running and w is not self.anchor]
        roll = self.random.random()
        if roll < 0.25 and len(others) + 1 < MOST_WORKERS:
            fault = self.draw_fault() if self.random.random() < 0.5 else ""
            self._say(f"add {self.cluster.add(fault, hold=False).name} with {fault or 'no fault'}")
        elif roll < 0.33 and self._coordinator_at is None:
            self.cluster.kill_coordinator()
            self._coordinator_at = time.monotonic() + self.random.choice((0.0, 0.2, 1.5))
            self._say("kill the coordinator")
        elif roll < 0.40:
            self._cut(self.random.choice([*others, self.anchor]))
        elif others:
            for victim in self.random.sample(others, min(len(others), self.random.choice((1, 1, 1, 2)))):
                self._hurt(victim)

    def replace_anchor(self) -> None:
        """Have another anchor where the job has let the first one go; here it never does."""

    def heal(self) -> None:
        """End all that lasts."""
        self._mend(float("inf"))

    def end(self) -> None:
        """End the job once one worker has finished: the others get a few seconds and are then stopped."""
        began = time.monotonic()
        while any(worker.running for worker in self.cluster.workers) and time.monotonic() < began + 3:
            time.sleep(0.02)
        for worker in self.cluster.workers:
            if worker.running and worker.outcome() is None:
                worker.kill() if not worker.commits() else worker.terminate()
        self.cluster.until_done(seconds=60.0)

    def close(self) -> None:
        self.heal()
        self.cluster.close()
        for proxy in self.proxies.values():
            proxy.close()

    # ---- parts

    def _hurt(self, victim: Worker) -> None:
        deed = self.random.choice(("kill", "kill", "stop", "stop", "leave"))
        self._say(f"{deed} {victim.name}")
        if deed == "kill":
            victim.kill()
        elif deed == "leave":
            victim.terminate()
        else:
            victim.stop()
            # Shorter than the limit of silence, about that long, and longer.
            self._wake_at[victim.name] = time.monotonic() + self.random.choice((0.2, 1.0, 3.0))

    def _cut(self, victim: Worker) -> None:
        self._say(f"cut {victim.name} off its coordinator")
        self.proxies[victim.name].cut()
        self._heal_at[victim.name] = time.monotonic() + self.random.choice((0.3, 1.2, 2.5))

    def _mend(self, now: float) -> None:
        by_name = {worker.name: worker for worker in self.cluster.workers}
        for name in [name for name, at in self._wake_at.items() if at <= now]:
            del self._wake_at[name]
            by_name[name].wake()
        for name in [name for name, at in self._heal_at.items() if at <= now]:
            del self._heal_at[name]
            self.proxies[name].heal()
        if self._coordinator_at is not None and self._coordinator_at <= now:
            self._coordinator_at = None
            self.cluster.start_coordinator(same_pod=self.random.random() < 0.5)
            self._say("a coordinator again")

    def draw_fault(self) -> str:
        point = self.random.choice(points(self.kind, self.version))
        chance = chance_of_any_step(point, self.version)
        step = "*" if self.random.random() < chance else str(self.random.randrange(2, 40))
        action = self.random.choice(_ACTIONS)
        if action.startswith("stop"):
            action = f"sleep={action.partition('=')[2]}"
        return f"{point}:{step}:{action}"

    def _proxied(self, name: str, address: str) -> str:
        host, _, port = address.rpartition(":")
        proxy = self.proxies[name] = CutProxy((host, int(port)))
        return proxy.address

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:6.2f} s  {what}")


def survive(chaos: Chaos, reference: Reference, *, early: bool) -> str:
    """One job under the faults of a seed; what happened, in a line. early: they begin before any commit."""
    try:
        chaos.begin()
        if not early:
            chaos.cluster.until(lambda: bool(chaos.anchor.commits()), "the anchor's first commit")
        until = time.monotonic() + 8.0
        while not chaos.cluster.finished() and time.monotonic() < until:
            time.sleep(chaos.random.choice((0.02, 0.1, 0.4, 0.8)))
            chaos.strike()
        chaos.heal()
        chaos.cluster.until(lambda: not chaos.anchor.running, "the anchor's end", 60.0)
        chaos.replace_anchor()
        chaos.cluster.until(lambda: not chaos.anchor.running, "the anchor's end", 60.0)
        chaos.end()
        finished = chaos.cluster.finished()
        assert chaos.anchor in finished, chaos.cluster.logs()
        check(chaos.cluster, reference, finished)
        assert chaos.cluster.reply is not None
        generation = chaos.cluster.reply.generation.number
        return f"{len(chaos.log)} deeds, {len(finished)} finished, generation {generation}"
    except AssertionError as error:
        story = "\n".join(chaos.log)
        raise AssertionError(f"{chaos.cluster.logs()}\n{story}\n{error}") from error
    finally:
        chaos.close()
