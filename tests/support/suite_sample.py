"""Leave out every other case of the slowest tests' functions, where a run of the whole suite asks for that.

All of them take more than the time that such a run has on two cores. `make test` sets SPRINGTIDE_CASES=some;
`make cases` runs each.
"""

from __future__ import annotations

import os

import pytest

SLOW = frozenset(
    f"tests/worker/{name}.py"
    for name in (
        "component/test_compatibility",
        "component/test_exact_device",
        "component/test_pods_mesh",
        "component/test_sharding_recovery",
        "component/test_worker_exact",
        "component/test_worker_points",
        "component/test_worker_salvage",
        "component/test_worker_servers",
        "component/test_worker_streams",
        "component/test_worker_tables_job",
        "unit/test_sharding_two_versions",
    )
)
"""Files whose tests take longest, by processor time."""


def left_out(nodes: list[str]) -> set[str]:
    """Return the tests that do not run each time. PURE.

    Args:
        nodes: Ids of all that were collected, in their order.
    """
    seen: dict[str, int] = {}
    found = set()
    for node in nodes:
        function, bracket, _ = node.partition("[")
        if bracket and node.partition("::")[0] in SLOW:
            seen[function] = number = seen.get(function, -1) + 1
            if number % 2:
                found.add(node)
    return found


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take cases out of what was collected, where the environment says so."""
    if os.environ.get("SPRINGTIDE_CASES") != "some":
        return
    out = left_out([item.nodeid for item in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]
