"""Random walks through the life of a job, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from coordinator_simulation import World
from coordinator_worker_model import Storage


def walk(
    seed: int,
    *,
    events: int = 300,
    last_step: int = 10_000,
    storage: Storage | None = None,
    limits: Sequence[int] = (0,),
    standby: int = 0,
) -> World:
    """Do random things to a job, then let it go on undisturbed.

    Raises BrokenPromise when something does not hold, or when the undisturbed job makes no progress.
    """
    chance = random.Random(seed)
    target = chance.choice([1, 2, 3])
    world = World(target=target, last_step=last_step, storage=storage, limits=limits, standby=standby)
    for _ in range(events):
        one_event(world, chance)
    world.heal()
    world.must_go_on()
    return world


def one_event(world: World, chance: random.Random) -> None:
    workers = list(world.workers.values())
    worker = chance.choice([w for w in workers if w.alive] or workers)
    pod = world.pods[worker.info.pod_uid]
    kinds = {
        "act": 25, "up": 20, "down": 20, "connect": 7, "elapse": 10, "operator": 4, "rounds": 4, "crash": 2,
        "stop": 2, "wake": 2, "break": 1, "delete": 1, "restart": 0.5, "second": 0.5, "away": 0.5,
        "process": 0.5, "report": 10, "drift": 1, "lifeline": 1,
    }  # fmt: skip
    if world.storage is not None:
        kinds |= {"suspend": 1.0, "resume": 0.3}
    match chance.choices(list(kinds), list(kinds.values()))[0]:
        case "suspend":
            world.suspended = True
        case "resume":
            world.suspended = False
        case "lifeline":
            world.end_lifeline(worker)
        case "act":
            world.act(worker, chance.random() < 0.3)
        case "up":
            world.deliver_up(worker)
        case "down":
            world.deliver_down(worker)
        case "connect":
            world.connect(worker, chance.choice([world.newest(), chance.randrange(len(world.coordinators))]))
        case "elapse":
            world.elapse(chance.choice([0.05, 0.4, 1, 3]))
        case "operator":
            world.operator()
        case "rounds":
            for _ in range(chance.choice([1, 5, 20])):
                world.round()
        case "report":
            worker.report()
        case "drift":
            world.drift(worker)
        case "crash":
            world.crash(worker)
        case "stop":
            world.stop(worker)
        case "wake":
            world.wake(worker)
        case "break":
            world.break_stream(worker)
        case "delete":
            world.delete_pod(pod, chance.choice([1, 30]))
        case "restart":
            world.restart_coordinator()
        case "second":
            world.second_coordinator()
        case "away":
            world.operator_up = not world.operator_up
        case "process":
            world.new_process(pod)
