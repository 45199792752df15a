"""The keys of a job: which one is the newest, which older ones count, and when a certificate is renewed.

A key is a token and, with TLS, an authority and a certificate that ends; each has a Secret of its own, which
is never changed. Another root key, another word in the job's annotation or a certificate that ends soon make
another Secret. Then the coordinator is made anew: it shows the newest certificate and lets in who has the
newest token or one that a pod of the job was made with. So no worker has to end, and pods that are made from
then on have the newest key. Parameter servers that are made know the older keys, too, and workers beside them
prove that they know one of the server's; servers of an older key hand over to successors, one at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job, JobKey
from springtide_operator.plan.observation import CoordinatorPod, Observation, Problem, ServerPod
from springtide_operator.plan.values import timestamp

STATUS = "keys"
RENEW_AT = 2 / 3  # of the validity of a certificate
SPREAD = 1 / 12  # of it, by job: certificates that were made together are not renewed together
LATE = 1 / 6  # of it: a pod whose certificate ends so soon should have had a successor long ago


def with_keys(job: Job, observation: Observation, now: float) -> Job:
    """Return the job with `status.keys` as it is from now on, the newest key first.

    Args:
        job: with its status.
        observation: of the job, with the newest key; without one the job stays as it is.
        now: in unix seconds.
    """
    if not observation.key:
        return job
    known = {key.id: key for key in reversed(job.keys)}
    carried = _carried(observation)
    carried.pop(observation.key, None)
    former = [
        _newer(known[one], carried[one]) for one in dict.fromkeys(k.id for k in job.keys) if one in carried
    ]
    former += [carried[one] for one in sorted(carried.keys() - known.keys())]
    newest = JobKey(observation.key)
    if job.tls:
        before = known.get(observation.key, newest).certificate_ends
        newest = replace(newest, certificate_ends=certificate_end(job.uid, before, observation, now))
    listed = [_entry(job, key) for key in (newest, *former)]
    return replace(job, status={**job.status, STATUS: listed})


def certificate_end(uid: str, before: int, observation: Observation, now: float) -> int:
    """Return when the certificate to show ends: that of the present one, until it is due.

    Args:
        uid: of the job.
        before: end of the present one, unix seconds; 0: there is none.
        observation: with the validity of certificates.
        now: in unix seconds.
    """
    seconds = observation.certificate_seconds
    # One that ends later than any could was made while the clock was wrong.
    if now < renewal(uid, before, seconds) and before <= now + seconds:
        return before
    return int(now + seconds)


def renewal(uid: str, ends: int, seconds: float) -> float:
    """Return when a certificate is due, in unix seconds.

    Args:
        uid: of the job.
        ends: when it ends, in unix seconds.
        seconds: of its validity.
    """
    share = zlib.crc32(uid.encode()) % 1000 / 1000
    return ends - seconds * (1 - RENEW_AT + SPREAD * share)


def wakes(job: Job, observation: Observation) -> list[float]:
    """Return when the plan has to look again, for the certificate's sake.

    Args:
        job: with its keys.
        observation: with the validity of certificates.
    """
    ends = job.keys[0].certificate_ends
    return [renewal(job.uid, ends, observation.certificate_seconds)] if ends else []


def version(job: Job) -> str:
    """Return which Secret the job is to have, as the shell remembers it."""
    return job.keys[0].name


def with_secret(job: Job, observation: Observation) -> Observation:
    """Return the observation, with the Secret as made only if it is that of the newest key.

    Args:
        job: with its keys.
        observation: of the job.
    """
    if not observation.key or observation.secret_version == version(job):
        return observation
    return replace(observation, secret_made=False)


def outdated_coordinator(job: Job, observation: Observation, pod: CoordinatorPod | None) -> str:
    """Return why a coordinator has to be made anew; "" where it knows the keys that it has to, and until the
    Secret is made that its successor reads: where that is refused, the one that runs must stay.

    Args:
        job: with its keys.
        observation: of the job.
        pod: of the coordinator; None: there is none.
    """
    if not observation.key or pod is None or not observation.secret_made:
        return ""
    wanted = tuple(key.name for key in job.keys)
    if pod.keys == wanted:
        return ""
    had, has = (pod.keys or ("",))[0], wanted[0]
    if had.partition("-")[0] != has.partition("-")[0]:
        return "the job has a new key"
    if had != has:
        return "its certificate ends soon"
    return "a key of the job has come or gone"


def outdated_server(job: Job, server: ServerPod) -> bool:
    """Return whether a parameter server has another key than the newest, or a certificate that was renewed.

    Args:
        job: with its keys.
        server: the pod.
    """
    return server.key != job.keys[0].name


def problem(job: Job, observation: Observation, now: float) -> Problem | None:
    """Say that a certificate ends soon, or has ended, which was not renewed in time; None where none does.

    Args:
        job: with its keys.
        observation: of the job.
        now: in unix seconds.
    """
    if not job.tls:
        return None
    shown = [(pod.name, pod.keys[0]) for pod in observation.coordinators if pod.live and pod.keys]
    shown += [(pod.name, pod.key) for pod in observation.servers if pod.live and pod.key]
    ends = [(JobKey.parse(key).certificate_ends, name) for name, key in shown]
    at, name = min((end for end in ends if end[0]), default=(0, ""))
    if not at or now < at - LATE * observation.certificate_seconds:
        return None
    when = f"{'has ended' if now >= at else 'ends'} at {timestamp(at)}"
    text = (
        f"the certificate of {name} {when}, and no successor with a newer one has come: processes that"
        " connect after it has ended are refused"
    )
    return Problem(reasons.CERTIFICATE_ENDING, text)


def _carried(observation: Observation) -> dict[str, JobKey]:
    """Return the keys that pods were made with which may still run, by id."""
    pods = [pod for pod in observation.workers if not pod.terminal]
    found = [pod.key for pod in pods] + [pod.key for pod in observation.servers if pod.phase != "Failed"]
    result: dict[str, JobKey] = {}
    for key in map(JobKey.parse, found):
        result[key.id] = _newer(key, result.get(key.id, key))
    return result


def _newer(one: JobKey, other: JobKey) -> JobKey:
    """Return which of two certificates of one key ends later."""
    return one if one.certificate_ends >= other.certificate_ends else other


def _entry(job: Job, key: JobKey) -> Mapping[str, Any]:
    entry = {"id": key.id, "secret": names.secret_name(job.name, job.uid, key.name)}
    if key.certificate_ends:
        entry["certificateEnds"] = timestamp(key.certificate_ends)
    return entry
