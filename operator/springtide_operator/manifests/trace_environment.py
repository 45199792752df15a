"""OpenTelemetry's variables that the pods of jobs get from the operator's own environment. PURE."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from springtide_operator.manifests.defaults import PodDefaults
from springtide_protocol.tracing import read_settings

VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_INSECURE",
    "OTEL_EXPORTER_OTLP_TRACES_INSECURE",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
)
"""Headers and keys are not among them: a manifest is no place for a credential, and a file's path means
nothing in another pod. Names and attributes of the operator are its own."""


def with_traces(defaults: PodDefaults, environ: Mapping[str, str]) -> PodDefaults:
    """Return the defaults of pods with the variables by which they export their spans as the operator does.

    A variable that the defaults have stays as it is, as one of a pod's template does.

    Args:
        defaults: of the operator's installer.
        environ: of the operator.
    """
    if not read_settings(environ).enabled:
        return defaults
    container: dict[str, Any] = copy.deepcopy(defaults.container)
    known = container.setdefault("env", [])
    if not isinstance(known, list):
        return defaults  # the API server refuses the pods, and says why
    taken = {entry.get("name") for entry in known if isinstance(entry, dict)}
    known += [
        {"name": name, "value": environ[name]}
        for name in VARIABLES
        if environ.get(name) and name not in taken
    ]
    return replace(defaults, container=container)
