"""Settings of the coordinator's process, from its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide_coordinator.membership import Settings
from springtide_coordinator.membership.consistency import BOUNDED, MODES
from springtide_coordinator.membership.messages import Consistency
from springtide_protocol.former_keys import former_tokens
from springtide_protocol.heartbeat import LIMIT, Heartbeat, of_members
from springtide_protocol.tls import ServerCertificate, read_certificate


class BadEnvironmentError(ValueError):
    """A variable is missing or wrong; the text says which, what it must be, and who sets it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything `serve` needs. Sizes are in processes, times in seconds, ports are TCP (0: a free one).

    checkpoint_seconds: wanted between two checkpoints; 0: none are made.
    """

    token: str
    number: int  # of the incarnation
    state_dir: Path
    job: str = "job"
    namespace: str = "default"
    job_uid: str = ""
    former_tokens: tuple[str, ...] = ()  # which pods of the job may still have
    operator_digest: str = ""  # SHA-256 of the operator's own token; empty: the job's suffices for all
    host: str = ""
    port: int = 7070
    metrics_port: int = 9401
    pod_ip: str = ""  # where the pod's other ports are reached; empty: as the first one
    target: int = 0
    minimum: int = 0
    maximum: int = 0
    standby: int = 0  # processes that wait beyond `target`
    servers: int = 0  # parameter servers wanted
    consistency: Consistency | None = None  # of their parameters
    certificate: ServerCertificate | None = None  # None: no TLS
    checkpoint_seconds: float = 0.0
    heartbeat: Heartbeat = field(default_factory=lambda: of_members(LIMIT))
    learns_heartbeats: bool = False  # a process that trains may be lost before the limit, by its heartbeats
    tick: float = 0.05
    membership: Settings = field(default_factory=Settings)


def read_options(env: Mapping[str, str]) -> Options:
    """Read the options from environment variables.

    Raises:
        BadEnvironmentError: a variable is missing or malformed.
    """
    silence = number(env, "SPRINGTIDE_OPERATOR_SILENCE_SECONDS", 15.0)
    limit = number(env, "SPRINGTIDE_KEEPALIVE_SECONDS", LIMIT)
    target = whole(env, "SPRINGTIDE_TARGET", 0)
    heartbeat = of_members(limit, target)  # not the maximum, which few jobs come near
    try:
        certificate = read_certificate(env)
    except ValueError as error:
        raise BadEnvironmentError(str(error)) from error
    return Options(
        token=required(env, "SPRINGTIDE_TOKEN", "the job's token, from the Secret NAME-token"),
        former_tokens=former_tokens(env),
        number=whole(env, "SPRINGTIDE_INCARNATION", 1, least=1),
        state_dir=Path(
            required(
                env,
                "SPRINGTIDE_STATE_DIR",
                "a directory that outlives a restart of the container: it counts the restarts, so that no"
                " name is used twice",
            )
        ),
        job=env.get("SPRINGTIDE_JOB", "job"),
        namespace=env.get("SPRINGTIDE_NAMESPACE", "default"),
        job_uid=env.get("SPRINGTIDE_JOB_UID", ""),
        operator_digest=digest(env),
        host=env.get("SPRINGTIDE_BIND", ""),
        port=whole(env, "SPRINGTIDE_PORT", 7070),
        metrics_port=whole(env, "SPRINGTIDE_METRICS_PORT", 9401),
        pod_ip=env.get("SPRINGTIDE_POD_IP", ""),
        target=target,
        minimum=whole(env, "SPRINGTIDE_MINIMUM", 0),
        maximum=whole(env, "SPRINGTIDE_MAXIMUM", 0),
        standby=whole(env, "SPRINGTIDE_STANDBY", 0),
        servers=whole(env, "SPRINGTIDE_SERVERS", 0),
        consistency=consistency(env),
        certificate=certificate,
        checkpoint_seconds=float(whole(env, "SPRINGTIDE_CHECKPOINT_SECONDS", 0)),
        heartbeat=heartbeat,
        learns_heartbeats=not env.get("SPRINGTIDE_KEEPALIVE_SECONDS"),
        membership=Settings(
            grace=heartbeat.return_within,
            standstill=limit / 4,
            return_after_standstill=heartbeat.return_after_standstill,
            operator_silence=silence,
        ),
    )


def consistency(env: Mapping[str, str]) -> Consistency | None:
    mode = env.get("SPRINGTIDE_CONSISTENCY", "")
    if not mode:
        return None
    if mode not in MODES:
        raise BadEnvironmentError(
            f"SPRINGTIDE_CONSISTENCY is {mode!r}; it must be one of {', '.join(MODES)}."
        )
    staleness = whole(env, "SPRINGTIDE_STALENESS", 4, least=1)
    return Consistency(mode, staleness if mode == BOUNDED else 0)


def digest(env: Mapping[str, str]) -> str:
    text = env.get("SPRINGTIDE_OPERATOR_DIGEST", "")
    if text and not re.fullmatch("[0-9a-f]{64}", text):
        raise BadEnvironmentError(
            "SPRINGTIDE_OPERATOR_DIGEST must be a SHA-256 in 64 hexadecimal digits. The operator sets it."
        )
    return text


def required(env: Mapping[str, str], name: str, meaning: str) -> str:
    """Return a variable that has to be set.

    Args:
        env: the process's environment.
        name: of the variable.
        meaning: of it, for the error.

    Raises:
        BadEnvironmentError: it is not set.
    """
    if not env.get(name):
        raise BadEnvironmentError(
            f"{name} is not set. It must be {meaning}. The operator sets it on the pod."
        )
    return env[name]


def whole(env: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    """Return a variable that is a whole number.

    Args:
        env: the process's environment.
        name: of the variable.
        default: where it is not set.
        least: the least one that is allowed.

    Raises:
        BadEnvironmentError: it is no whole number, or less.
    """
    text = env.get(name) or str(default)
    if not text.isdigit() or int(text) < least:
        raise BadEnvironmentError(f"{name} is {text!r}; it must be a whole number of at least {least}.")
    return int(text)


def number(env: Mapping[str, str], name: str, default: float) -> float:
    """Return a variable that is a positive number of seconds.

    Args:
        env: the process's environment.
        name: of the variable.
        default: where it is not set.

    Raises:
        BadEnvironmentError: it is no positive number.
    """
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise BadEnvironmentError(f"{name} is {text!r}; it must be a positive number of seconds.")
    return value
