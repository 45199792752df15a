"""A TrainingJob's status as one small value for people. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Condition:
    true: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class JobView:
    """Numbers are None where the status does not tell them (yet)."""

    namespace: str
    name: str
    uid: str
    deleting: bool
    taken_up: bool  # an operator has written a status
    state: str
    message: str
    conditions: dict[str, Condition]
    workers: str
    balance: tuple[str, ...]  # the slowest workers with their parts of a batch, in words; empty: even parts
    standbys: str  # that wait, warmed up, and wanted; "" for a job without
    standby_trouble: str  # why those that are asked for are not ready; "": they are, or soon will be
    replicas: int
    ready: int
    servers: str  # ready and wanted; "" for a job without
    generation: int | None
    step: int | None
    percent: int | None  # of the job's steps that are done
    ends_at: datetime | None  # an estimate; with a time zone
    samples_per_second: str
    goodput: str
    restarts: int
    last_recovery: str
    epoch: int | None
    data: dict[str, int]
    values: dict[str, str]
    memory: str  # of a worker, in words; "" before it is known
    failed_pod: str
    failed_message: str

    def is_true(self, condition: str) -> bool:
        found = self.conditions.get(condition)
        return found is not None and found.true


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(value or ""))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def view(job: Object) -> JobView:
    """Read a TrainingJob as the API server stores it; missing fields are no error."""
    meta, status = job["metadata"], job.get("status") or {}
    workers, data = status.get("workers") or {}, status.get("data") or {}
    failure, standby = status.get("lastFailure") or {}, status.get("standby") or {}
    return JobView(
        namespace=meta.get("namespace", ""),
        name=meta["name"],
        uid=meta.get("uid", ""),
        deleting="deletionTimestamp" in meta,
        taken_up=bool(status),
        state=str(status.get("state") or ""),
        message=str(status.get("message") or ""),
        conditions={
            str(c.get("type")): Condition(
                c.get("status") == "True", c.get("reason", ""), c.get("message", "")
            )
            for c in status.get("conditions") or []
        },
        workers=str(workers.get("summary") or ""),
        balance=tuple(_share(entry) for entry in workers.get("balance") or []),
        standbys=str(standby.get("summary") or ""),
        standby_trouble=str(standby.get("trouble") or ""),
        replicas=_number(workers.get("replicas")) or 0,
        ready=_number(workers.get("ready")) or 0,
        servers=str((status.get("parameterServers") or {}).get("summary") or ""),
        generation=_number(status.get("generation")),
        step=_number(status.get("step")),
        percent=_number(status.get("progress")),
        ends_at=_time(status.get("estimatedCompletionTime")),
        samples_per_second=str(status.get("samplesPerSecond") or ""),
        goodput=str(status.get("goodput") or ""),
        restarts=_number((status.get("restarts") or {}).get("total")) or 0,
        last_recovery=str(status.get("lastRecoverySeconds") or ""),
        epoch=_number(data.get("epoch")),
        data={name: value for name, value in data.items() if _number(value) is not None},
        values={str(name): str(value) for name, value in (status.get("values") or {}).items()},
        memory=_memory(status.get("memory") or {}),
        failed_pod=str(failure.get("pod") or ""),
        failed_message=str(failure.get("message") or ""),
    )


def _share(entry: Object) -> str:
    seconds = f" ({entry['secondsPerSample']} s each)" if entry.get("secondsPerSample") else ""
    return f"{entry.get('name', '')} {_number(entry.get('samples')) or 0} samples{seconds}"


def _memory(memory: Object) -> str:
    if not memory.get("perWorker"):
        return ""
    text = f"each worker needs {memory['perWorker']} of memory without activations"
    if memory.get("limit"):
        text += f" and has {memory['limit']}"
    return f"{text}; {memory.get('perWorkerAtMinReplicas', '?')} where minReplicas are left"


def done(job: JobView) -> str:
    """How much of the job is done, and when the rest is expected to be; empty where nobody knows its end."""
    if job.percent is None:
        return ""
    text = f"{job.percent} % done"
    return text if job.ends_at is None else f"{text}, the rest by about {job.ends_at:%Y-%m-%d %H:%M:%S} UTC"


def progress(job: JobView) -> str:
    """One line of numbers; empty before there are any."""
    parts = []
    if job.step is not None:
        parts.append(f"step {job.step}")
    if job.percent is not None:
        parts.append(done(job))
    if job.epoch:
        parts.append(f"epoch {job.epoch}")
    if job.workers:
        parts.append(f"{job.workers} workers")
    if job.standbys:
        parts.append(f"{job.standbys} standbys")
    if job.generation:
        parts.append(f"generation {job.generation}")
    if job.samples_per_second:
        parts.append(f"{job.samples_per_second} samples/s")
    if job.goodput:
        parts.append(f"goodput {job.goodput}")
    if job.restarts:
        parts.append(f"{job.restarts} {'restart' if job.restarts == 1 else 'restarts'}")
    return ", ".join(parts) if job.step is not None or job.generation else ""
