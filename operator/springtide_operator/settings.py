"""Settings of the operator's process, from its environment."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide_operator.api import names
from springtide_operator.manifests.defaults import PodDefaults
from springtide_operator.manifests.protection import Doors
from springtide_operator.manifests.trace_environment import with_traces

DEFAULT_NAMESPACE = "springtide-system"
CERTIFICATE_SECONDS = 90 * 86_400.0
LEAST_CERTIFICATE_SECONDS, MOST_CERTIFICATE_SECONDS = 30, 315_360_000
SERVICE_ACCOUNT_DIR = "SPRINGTIDE_SERVICE_ACCOUNT_DIR"
MOUNTED_AT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NAMESPACE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def service_account_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder with the pod's `token`, `ca.crt` and `namespace`.

    A variable names it where a container has no mounts of its own: on the embedded cluster.
    """
    return Path(environ.get(SERVICE_ACCOUNT_DIR) or MOUNTED_AT)


class BadEnvironmentError(ValueError):
    """A variable is malformed; the text says which and what it must be."""


@dataclass(frozen=True)
class Settings:
    """Times in seconds."""

    namespace: str = DEFAULT_NAMESPACE
    watched: tuple[str, ...] = ()  # namespaces whose jobs are run; empty: all
    managed_by: str = names.DEFAULT_CLASS  # class of the jobs that are run
    release: str = names.APP  # name of this installation
    log_level: str = "INFO"
    identity: str = "operator"
    coordinator_image: str = names.OPERATOR_IMAGE
    server_image: str = names.PARAMETER_SERVER_IMAGE
    coordinator_pull_policy: str = "IfNotPresent"  # and of parameter servers
    pod_defaults: PodDefaults = field(default_factory=PodDefaults)
    jobs_tls: bool = False  # of new jobs that do not say
    certificate_seconds: float = CERTIFICATE_SECONDS  # for which certificates of jobs are valid
    doors: Doors | None = None  # None: no NetworkPolicies are made for jobs
    bind: str = ""
    metrics_port: int = names.OPERATOR_METRICS_PORT
    root_key: bytes | None = None
    tick: float = 2.0
    resync: float = 600.0
    request_timeout: float = 10.0
    sync_timeout: float = 2.0


def read_settings(env: Mapping[str, str]) -> Settings:
    """Raise BadEnvironmentError."""
    text = env.get("SPRINGTIDE_METRICS_PORT") or str(names.OPERATOR_METRICS_PORT)
    if not text.isdigit() or int(text) > 65535:
        raise BadEnvironmentError(f"SPRINGTIDE_METRICS_PORT is {text!r}: it must be a port number, 0-65535")
    key = env.get("SPRINGTIDE_ROOT_KEY")
    if key is not None and len(key) < 16:
        raise BadEnvironmentError("SPRINGTIDE_ROOT_KEY must have at least 16 characters")
    return Settings(
        namespace=_namespace(env),
        watched=_watched(env),
        managed_by=_managed_by(env),
        release=env.get("SPRINGTIDE_RELEASE") or names.APP,
        log_level=_log_level(env),
        identity=_identity(env),
        coordinator_image=env.get("SPRINGTIDE_COORDINATOR_IMAGE") or names.OPERATOR_IMAGE,
        server_image=env.get("SPRINGTIDE_PARAMETER_SERVER_IMAGE") or names.PARAMETER_SERVER_IMAGE,
        coordinator_pull_policy=_pull_policy(env),
        pod_defaults=_pod_defaults(env),
        jobs_tls=_flag(env, "SPRINGTIDE_JOBS_TLS", "false"),
        certificate_seconds=_certificate_seconds(env),
        doors=_doors(env),
        bind=env.get("SPRINGTIDE_BIND", ""),
        metrics_port=int(text),
        root_key=key.encode() if key else None,
    )


def _watched(env: Mapping[str, str]) -> tuple[str, ...]:
    items = tuple(
        name for part in env.get("SPRINGTIDE_WATCH_NAMESPACES", "").split(",") if (name := part.strip())
    )
    wrong = [name for name in items if not _NAMESPACE_NAME.fullmatch(name)]
    if wrong or len(set(items)) != len(items):
        raise BadEnvironmentError(
            f"SPRINGTIDE_WATCH_NAMESPACES is {','.join(items)!r}: it must be names of namespaces,"
            " each once, with commas between"
        )
    return items


def _managed_by(env: Mapping[str, str]) -> str:
    text = env.get("SPRINGTIDE_MANAGED_BY") or names.DEFAULT_CLASS
    if len(text) > 63 or not re.fullmatch(names.CLASS_PATTERN, text):
        raise BadEnvironmentError(
            f"SPRINGTIDE_MANAGED_BY is {text!r}: it must be what jobs may have as spec.managedBy, a name of"
            " at most 63 characters, with a domain and a slash before it or not"
        )
    return text


def _pod_defaults(env: Mapping[str, str]) -> PodDefaults:
    text = env.get("SPRINGTIDE_POD_DEFAULTS")
    try:
        given = PodDefaults.parse(text) if text else PodDefaults()
    except ValueError as error:
        raise BadEnvironmentError(f"SPRINGTIDE_POD_DEFAULTS {error}") from error
    return with_traces(given, env) if _flag(env, "SPRINGTIDE_TRACE_JOBS", "true") else given


def _pull_policy(env: Mapping[str, str]) -> str:
    policy = env.get("SPRINGTIDE_COORDINATOR_PULL_POLICY") or "IfNotPresent"
    if policy not in ("Always", "IfNotPresent", "Never"):
        raise BadEnvironmentError(
            f"SPRINGTIDE_COORDINATOR_PULL_POLICY is {policy!r}: say Always, IfNotPresent or Never"
        )
    return policy


def _flag(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name) or default
    if text not in ("true", "false"):
        raise BadEnvironmentError(f"{name} is {text!r}: say true or false")
    return text == "true"


def _certificate_seconds(env: Mapping[str, str]) -> float:
    text = env.get("SPRINGTIDE_CERTIFICATE_SECONDS") or str(int(CERTIFICATE_SECONDS))
    if not text.isdigit() or not LEAST_CERTIFICATE_SECONDS <= int(text) <= MOST_CERTIFICATE_SECONDS:
        raise BadEnvironmentError(
            f"SPRINGTIDE_CERTIFICATE_SECONDS is {text!r}: it must be a whole number of seconds from"
            f" {LEAST_CERTIFICATE_SECONDS} to {MOST_CERTIFICATE_SECONDS} (ten years)"
        )
    return float(text)


def _doors(env: Mapping[str, str]) -> Doors | None:
    text = env.get("SPRINGTIDE_NETWORK_POLICY")
    try:
        return Doors.parse(text, _namespace(env)) if text else None
    except ValueError as error:
        raise BadEnvironmentError(f"SPRINGTIDE_NETWORK_POLICY is {text!r}: it {error}") from error


def _log_level(env: Mapping[str, str]) -> str:
    level = (env.get("SPRINGTIDE_LOG_LEVEL") or "info").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise BadEnvironmentError(
            f"SPRINGTIDE_LOG_LEVEL is {level.lower()!r}: say debug, info, warning or error"
        )
    return level


def _namespace(env: Mapping[str, str]) -> str:
    """Return the namespace of the operator's own lease and root key."""
    for variable in ("SPRINGTIDE_OPERATOR_NAMESPACE", "POD_NAMESPACE"):
        if env.get(variable):
            return env[variable]
    try:
        file = service_account_folder(env) / "namespace"
        return file.read_text(encoding="utf-8").strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE


def _identity(env: Mapping[str, str]) -> str:
    """A pod restarts in place under the identity it had: nobody else can hold its lease, so it need not
    wait.
    """
    if env.get("POD_NAME") and env.get("POD_UID"):
        return f"{env['POD_NAME']}_{env['POD_UID']}"
    return f"{socket.gethostname()}_{uuid.uuid4()}"
