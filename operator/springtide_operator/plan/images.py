"""Images of coordinators and parameter servers that the next operator goes on with, and when they change.

A job's pods meet each other, and a release understands the one before it and no older one. So a job keeps
the images that its first pods were made of: they are noted in status, and successors come from them, however
often the operator is upgraded meanwhile. The present operator's images take their place at a boundary, a
moment at which no other release can be in the way: no pod of the job runs, or the coordinator said of all
that run that they speak the operator's version. No pod is replaced for its image's sake.
"""

from __future__ import annotations

from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import MemberReport, Observation, ServerReport
from springtide_protocol.versions import PROTOCOL_VERSION


def of_coordinator(observation: Observation, ledger: Ledger) -> str:
    """Return the image of the next coordinator, unless the manifest names one.

    Args:
        observation: of the job.
        ledger: with the incarnation of the coordinator that is replaced.
    """
    own, noted = observation.coordinator_image, ledger.coordinator_image
    if not noted or not own:
        return noted or own
    return own if _all_speak_own(observation, ledger) else noted


def of_server(observation: Observation, ledger: Ledger) -> str:
    """Return the image of the next parameter server, unless the manifest names one.

    Args:
        observation: of the job.
        ledger: with the incarnation of the coordinator that the server will speak to.
    """
    own, noted = observation.server_image, ledger.server_image
    if not noted or not own:
        return noted or own
    report = observation.report_of(ledger.incarnation)
    understood = report is None or report.protocol >= PROTOCOL_VERSION
    return own if understood and _all_speak_own(observation, ledger) else noted


def _all_speak_own(observation: Observation, ledger: Ledger) -> bool:
    """Return whether no pod of the job runs but those that are known to speak the operator's version.

    Args:
        observation: of the job.
        ledger: with the incarnation of the coordinator whose word counts.
    """
    # Those that are to go may still run.
    running = [pod.uid for pod in observation.workers if pod.end is None]
    running += [pod.uid for pod in observation.servers if pod.phase not in ("Succeeded", "Failed")]
    spoken = _spoken(observation, ledger)
    return all(spoken.get(uid, 0) >= PROTOCOL_VERSION for uid in running)


def _spoken(observation: Observation, ledger: Ledger) -> dict[str, int]:
    """Return by pod (uid) the newest protocol version that all its connected processes speak."""
    report = observation.report_of(ledger.incarnation)
    if report is None:
        return {}
    every: list[MemberReport | ServerReport] = [*report.members, *report.servers]
    spoken: dict[str, int] = {}
    for told in every:
        if told.connected:
            spoken[told.pod_uid] = min(told.protocol, spoken.get(told.pod_uid, told.protocol))
    return spoken
