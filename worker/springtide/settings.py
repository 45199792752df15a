"""Settings from the pod's environment; the only place that reads it."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.checkpoint.location import CheckpointLocation
from springtide.errors import SpringtideError
from springtide_protocol.former_keys import former_authorities, former_tokens

PREFIX = "SPRINGTIDE_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Names as in the environment without the prefix; coordinator "": the script trains alone."""

    job: str = ""
    namespace: str = ""
    job_uid: str = ""
    coordinator: str = ""
    token: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    pod_ip: str = "127.0.0.1"
    authority: str = dataclasses.field(default="", repr=False)
    """The authority of the job in PEM, which the coordinator's certificate must be of; empty: no TLS."""
    former_tokens: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Tokens of the job that parameter servers may still have, besides `token`."""
    former_authorities: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Authorities that their certificates may still be of, in PEM."""
    bind: str = ""
    slot: int = 0
    attempt: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    pod_folder: str = ""
    """Folder in which processes of a pod find each other, and which their launcher reads; "" without one."""
    bucket_mib: float = 25.0
    backend: str = "Auto"
    compression: str = "None"
    """How gradients travel: as one of `comm.compression.KINDS`, or of `ps.compression.KINDS` to servers."""
    rows_compression: str = "None"
    """Form in which, with Hybrid, gradients of rows travel to servers; `compression` is of the dense ones."""
    top_k_ratio: float = 0.01
    """Part of a gradient's elements that travels with compression TopK."""
    shard: str = "None"
    """State that workers share out with AllReduce: None, Optimizer, or Gradients (that as well)."""
    shards_at_once_mib: float = 2.0
    """State that a worker sends or receives before a generation's first step, of what could wait until
    training goes on: copies of what lost workers had. The smallest of all workers' counts."""
    shards_under_way_mib: float = 5.0
    """Memory that a worker has for gradients, sums or values on their way, however small the model is: with
    less there are more chunks. The smallest of all workers' counts."""
    balance: str = "Even"
    """How global batches are cut: by the workers' Speed, or in Even parts."""
    salvage: str = "Auto"
    """Whether what survivors have computed of a dropped step is kept: Always, Never, or where copies of
    gradients take next to no time of a step (Auto)."""
    follow_mib: float = 256.0
    """Parameters and optimizer state from which on a joiner receives them while the others train; a smaller
    state is sent when it is a member."""
    strategy: str = "AllReduce"
    node: str = ""
    """The node's name, where the operator says it."""
    replication: int = 1
    consistency: str = "Synchronous"
    staleness: int = 4
    """Steps that the fastest worker may be ahead of the slowest with BoundedStaleness."""
    group_size: int = 1
    early_values: bool = True
    """Whether servers send values before a step is decided, where they can, with Synchronous."""
    termination_log: str = "/dev/termination-log"
    metrics_port: int = 9400
    metrics_file: str = ""
    """File in which the launcher of several processes looks for the port of this one's metrics; "": none."""
    step_log: str = ""
    fault: str = ""
    connect_seconds: float = 10.0
    """Also how long a parameter server that owes an answer may give no sign of life."""
    collective_seconds: float = 1800.0
    """Above any hang limit: a collective that takes long proves nothing, the coordinator's word does."""
    formation_seconds: float = 60.0
    threads: int = 0
    logical_workers: int = 0
    """Parts that the global batch is cut into for exact sums; 0: sums are not exact."""
    mkl_cbwr: str = ""
    cublas_workspace: str = ""
    checkpoint: CheckpointLocation = dataclasses.field(default_factory=CheckpointLocation)
    memory_bytes: int = 0
    """Bytes that the processes of a pod may take together, for whoever knows better than the container's
    control group; 0: what that says."""
    process_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def server_authorities(self) -> str:
        """The authorities of parameter servers' certificates, in PEM, the newest first; empty: no TLS."""
        return "\n".join((self.authority, *self.former_authorities)) if self.authority else ""

    @property
    def asynchronous(self) -> bool:
        """Whether workers do not step together."""
        return self.strategy == "ParameterServer" and self.consistency != "Synchronous"

    @property
    def sum_compression(self) -> str:
        """How gradients travel that the workers sum among themselves."""
        return "None" if self.strategy == "ParameterServer" else self.compression

    @property
    def push_compression(self) -> str:
        """How gradients travel to servers."""
        return self.rows_compression if self.strategy == "Hybrid" else self.compression

    @property
    def alone(self) -> bool:
        return not self.coordinator


class _Variables:
    """Read variables of the environment; what cannot be is a SpringtideError that names the variable, its
    value and what it should be."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def number(self, name: str, default: float, minimum: float) -> float:
        """Return a variable that is a number.

        Args:
            name: with the prefix, if it has it.
            default: where it is empty or missing.
            minimum: the least that it may be.
        """
        text = self._environ.get(name, "")
        if not text:
            return default
        try:
            # OMP_NUM_THREADS may be a list by nesting level, of which the first counts here.
            value = float(text.partition(",")[0])
        except ValueError:
            value = float("nan")
        if not value >= minimum:
            raise SpringtideError(
                f"environment variable {name} must be a number >= {minimum:g}, got {text!r}"
            )
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a variable of ours, named without the prefix; the default where it is empty or missing."""
        return self._environ.get(PREFIX + name, "") or default

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return a variable of ours, named without the prefix; the first of `allowed` where it is missing."""
        value = self.text(name, allowed[0])
        if value not in allowed:
            raise SpringtideError(
                f"environment variable {PREFIX}{name} must be one of {', '.join(allowed)}, got {value!r}"
            )
        return value


def _check_launcher(variables: _Variables) -> None:
    if variables.text("LAUNCHER") == "torchrun":
        raise SpringtideError(
            "this process was started by `springtide launch --torchrun-env`, which is for scripts that do not"
            " use springtide: leave --torchrun-env out, or springtide.init()"
        )


def _check_job(variables: _Variables) -> None:
    """Raise SpringtideError where the address of a coordinator, or what goes with one, cannot be."""
    coordinator, text = variables.text("COORDINATOR"), variables.text
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise SpringtideError(
            f"environment variable SPRINGTIDE_COORDINATOR must be host:port, got {coordinator!r}"
        )
    for name in ("TOKEN", "POD_UID", "POD_NAME", "POD_IP"):
        if not text(name):
            raise SpringtideError(
                f"environment variable SPRINGTIDE_{name} is missing, but SPRINGTIDE_COORDINATOR is set: "
                "the operator sets both; unset SPRINGTIDE_COORDINATOR to train alone"
            )
    try:
        ipaddress.ip_address(text("POD_IP"))
    except ValueError:
        raise SpringtideError(
            f"environment variable SPRINGTIDE_POD_IP must be an IP address, got {text('POD_IP')!r}"
        ) from None


def _authority_in(environ: Mapping[str, str]) -> str:
    from springtide_protocol.tls import read_authority  # gRPC is of no use to a process alone

    try:
        return read_authority(environ)
    except ValueError as error:
        raise SpringtideError(f"environment variable {error}") from error


def _checkpoint_location(variables: _Variables) -> CheckpointLocation:
    text, number = variables.text, variables.number
    return CheckpointLocation(
        uri=text("CHECKPOINT_URI"),
        folder=f"{text('NAMESPACE', 'default')}-{text('JOB', 'job')}-{text('JOB_UID', 'alone')[:8]}",
        interval=number("SPRINGTIDE_CHECKPOINT_SECONDS", 60.0, 0),
        keep=int(number("SPRINGTIDE_CHECKPOINT_KEEP", 3, 1)),
        restore_from=text("RESTORE_FROM"),
    )


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Raise SpringtideError that names the variable, its value and what it should be."""
    variables = _Variables(environ)
    number, text, choice = variables.number, variables.text, variables.choice
    _check_launcher(variables)
    coordinator, authority = text("COORDINATOR"), ""
    if coordinator:
        _check_job(variables)
        authority = _authority_in(environ)
    return Settings(
        job=text("JOB"),
        namespace=text("NAMESPACE"),
        job_uid=text("JOB_UID"),
        coordinator=coordinator,
        token=text("TOKEN"),
        authority=authority,
        former_tokens=former_tokens(environ),
        former_authorities=former_authorities(environ),
        pod_name=text("POD_NAME"),
        pod_uid=text("POD_UID"),
        pod_ip=text("POD_IP", "127.0.0.1"),
        bind=text("BIND"),
        slot=int(number("SPRINGTIDE_SLOT", 0, 0)),
        attempt=int(number("SPRINGTIDE_ATTEMPT", 0, 0)),
        # Where accelerate is used, LOCAL_RANK is hidden from it: it would take it for torchrun's.
        local_rank=int(number("SPRINGTIDE_LOCAL_RANK", number("LOCAL_RANK", 0, 0), 0)),
        local_world_size=int(number("LOCAL_WORLD_SIZE", 1, 1)),
        pod_folder=text("POD_FOLDER"),
        backend=choice("BACKEND", ("Auto", "Gloo", "NCCL")),
        compression=choice("COMPRESSION", ("None", "BF16", "FP16", "PowerSGD", "TopK")),
        rows_compression=choice("ROWS_COMPRESSION", ("None", "BF16", "FP16")),
        top_k_ratio=min(number("SPRINGTIDE_TOP_K_RATIO", 0.01, 1e-6), 1.0),
        shard=choice("SHARD", ("None", "Optimizer", "Gradients")),
        shards_at_once_mib=number("SPRINGTIDE_SHARDS_AT_ONCE_MIB", 2.0, 0),
        shards_under_way_mib=number("SPRINGTIDE_SHARDS_UNDER_WAY_MIB", 5.0, 0.001),
        balance=choice("BALANCE", ("Even", "Speed")),
        salvage=choice("SALVAGE", ("Auto", "Always", "Never")),
        follow_mib=number("SPRINGTIDE_FOLLOW_MIB", 256.0, 0),
        strategy=choice("STRATEGY", ("AllReduce", "ParameterServer", "Hybrid")),
        node=text("NODE"),
        replication=int(number("SPRINGTIDE_REPLICATION", 1, 1)),
        consistency=choice("CONSISTENCY", ("Synchronous", "BoundedStaleness", "Asynchronous")),
        staleness=int(number("SPRINGTIDE_STALENESS", 4, 1)),
        group_size=int(number("SPRINGTIDE_GROUP_SIZE", 1, 1)),
        early_values=number("SPRINGTIDE_EARLY_VALUES", 1, 0) > 0,
        bucket_mib=number("SPRINGTIDE_BUCKET_MIB", 25.0, 0.001),
        termination_log=text("TERMINATION_LOG", "/dev/termination-log"),
        metrics_port=int(number("SPRINGTIDE_METRICS_PORT", 9400, 0)),
        metrics_file=text("METRICS_FILE"),
        step_log=text("STEP_LOG"),
        fault=text("FAULT"),
        connect_seconds=number("SPRINGTIDE_CONNECT_SECONDS", 10.0, 1.0),
        collective_seconds=number("SPRINGTIDE_COLLECTIVE_SECONDS", 1800.0, 1.0),
        threads=int(number("OMP_NUM_THREADS", 0, 0)),
        logical_workers=int(number("SPRINGTIDE_LOGICAL_WORKERS", 0, 0)),
        mkl_cbwr=environ.get("MKL_CBWR", ""),
        cublas_workspace=environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        memory_bytes=int(number("SPRINGTIDE_MEMORY_BYTES", 0, 0)),
        checkpoint=_checkpoint_location(variables),
    )
