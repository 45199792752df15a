"""The operator's call of a coordinator, in the release that PYTHONPATH has. argv: IP TOKEN POD...

Its pods are the job's workers. Prints as JSON what the operator has understood.
"""

from __future__ import annotations

import asyncio
import json
import sys

from springtide_operator.coordinator_connection import CoordinatorConnection
from springtide_operator.plan.coordinator_sync import CoordinatorUpdate, LivingPod
from springtide_operator.plan.observation import CoordinatorPod


async def call(ip: str, token: str, pods: list[str]) -> dict[str, object]:
    """Call the first incarnation once.

    Args:
        ip: of the coordinator.
        token: of the job.
        pods: names of the workers' pods, in the order of their slots.

    Returns:
        Phase, step and the pods of connected members; or why the call failed.
    """
    connection = CoordinatorConnection(token, 20.0)
    pod = CoordinatorPod(name="c", uid="c", incarnation=1, phase="Running", ip=ip)
    living = tuple(LivingPod(f"uid-{slot}", name, slot, True, 0.0) for slot, name in enumerate(pods))
    try:
        if not await connection.call(pod, CoordinatorUpdate(len(pods), 1, 8, 1, living)):
            return {"why": connection.why}
        report = connection.report
        assert report is not None
        connected = sorted(member.pod_uid for member in report.members if member.connected)
        return {"phase": report.phase, "step": report.step, "connected": connected}
    finally:
        await connection.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(call(sys.argv[1], sys.argv[2], sys.argv[3:]))))
