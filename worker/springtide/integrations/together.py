"""Do things together with the job's other workers between two steps, for adapters of other trainers.

The coordinator deals it as it deals the samples of an evaluation: to one worker, and again if that one is
lost. So nobody waits in a collective, and a worker of which the others know nothing holds up nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import springtide
from springtide import api
from springtide.elastic.runtime import Runtime

_MOST_NUMBERS = 64
"""Numbers that one evaluation of the library's takes."""


def the_runtime() -> Runtime:
    """Return the runtime of this process, which has called `springtide.init()`."""
    assert api.active_runtime is not None
    return api.active_runtime


def runs_loops() -> None:
    """Say that the adapter runs the training loops and what is behind them, so that those which the job has
    ended give a worker that joins nothing."""
    the_runtime().loops.past.leave_empty()


def in_training() -> bool:
    """Return whether the members have met, so that they can do things together."""
    return the_runtime().state.opened_loops > 0


def check_count(caller: str, name: str, value: object) -> None:
    """Raise ValueError for a number of workers or steps that is no integer of 1 or more.

    Args:
        caller: names the class in the error.
        name: of the argument.
        value: of it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{caller}(): {name} must be an integer of 1 or more, got {value!r}")


def impossible_settings(counted: str) -> list[str]:
    """Return a sentence for each setting of the job with which no other library's trainer can be.

    Args:
        counted: names what counts the steps that all workers make.
    """
    runtime, problems = the_runtime(), []
    if runtime.settings.asynchronous:
        problems.append(
            f"consistency {runtime.settings.consistency} has no common steps, which {counted} count: set "
            "strategy.parameterServer.consistency to Synchronous"
        )
    if runtime.pod is not None:
        problems.append("a model that is divided by springtide.mesh() was not tried: write the loop yourself")
    return problems


def steps_elsewhere() -> bool:
    """Return whether no worker has all gradients: servers do, or each worker has a shard."""
    settings = the_runtime().settings
    return not settings.alone and (settings.strategy != "AllReduce" or settings.shard != "None")


def own_rank() -> int:
    """Return the rank that another library is to see in this process.

    It is 1 until the members have met, since nobody is the first one before; 0 where a process trains alone.
    """
    waits = not the_runtime().settings.alone and not in_training()
    return 1 if waits else springtide.rank()


def once(work: Callable[[], object], show_rank: Callable[[int | None], object]) -> None:
    """Have one of the workers do something as rank 0 while the others wait for it; another one if it is lost.

    Args:
        work: what is to be done; it may begin again in another worker.
        show_rank: tells the other library a rank, or with None the process's own.
    """
    for _ in the_runtime().evaluations.errand():
        show_rank(0)
        work()
    show_rank(None)


def agreed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers as one of the workers has them.

    Last bits may differ between workers, and what follows from them (the best model, an early end) has to be
    the same everywhere.

    Args:
        numbers: by name; all workers have the same names.
    """
    names = list(numbers)
    found: dict[str, float] = {}
    for first in range(0, len(names), _MOST_NUMBERS):
        some = names[first : first + _MOST_NUMBERS]
        errand = the_runtime().evaluations.errand()
        for _ in errand:
            springtide.report(**{name: numbers[name] for name in some})
        found |= {name: value for name, value in errand.values.items() if name in some}
    return found
