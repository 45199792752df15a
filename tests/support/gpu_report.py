"""The report of what works on a device: made of events of tests, as JSON and as a table.

A capability is "passed" only where a test of it passed and none failed. Where none ran it is "not run".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_capabilities import CAPABILITIES, FIGURES
from rich.console import Console
from rich.table import Table

FORMAT = 1
OK, FAILED, NO_DEVICE = 0, 1, 3
"""Exit codes. Without a device nothing was shown, and that must not look like success in a pipeline; it is no
failure of the code's either, so it has a code of its own. (pytest uses 2, as make does for any failure.)"""

_OUTCOMES = ("passed", "failed", "skipped")
_STATUSES = (*_OUTCOMES, "not run")
_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow", "not run": "red"}


@dataclass(frozen=True)
class Outcome:
    """How one test ended. outcome: passed, failed or skipped; reason: one line, "" where it passed."""

    id: str
    capability: str
    outcome: str
    seconds: float
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def status_of(outcomes: Iterable[str]) -> str:
    """Return what a capability is, by the outcomes of its tests."""
    found = set(outcomes)
    return next((one for one in ("failed", "passed", "skipped") if one in found), "not run")


def make_report(
    device: Mapping[str, Any] | None,
    versions: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    *,
    seconds: float,
    reason: str = "",
    not_run: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the report (see SCHEMA).

    Args:
        device: what `gpu_run.find_device` says; None: there is none.
        versions: by name; None for what is not there.
        outcomes: of all tests that began.
        seconds: of the whole run.
        reason: why nothing was run at all.
        not_run: by capability, why no test of it, or not all of them, began.
    """
    not_run = not_run or {}
    capabilities = []
    for name, title in CAPABILITIES.items():
        own = [outcome for outcome in outcomes if outcome.capability == name]
        status = status_of(outcome.outcome for outcome in own)
        why = not_run.get(name, "")
        if why and status in ("passed", "skipped"):
            status = "not run"
        if not why and status != "passed":
            why = "; ".join(dict.fromkeys(o.reason for o in own if o.outcome == status))
            why = why or reason or "no test of it was found"
        capabilities.append(
            {
                "name": name,
                "title": title,
                "status": status,
                "reason": why or None,
                "seconds": round(sum(outcome.seconds for outcome in own), 3),
                "tests": [_test(outcome) for outcome in own],
            }
        )
    measured = {name: value for outcome in outcomes for name, value in outcome.figures.items()}
    return {
        "format": FORMAT,
        "device": None if device is None else dict(device),
        "reason": reason or None,
        "versions": dict(versions),
        "seconds": round(seconds, 3),
        "capabilities": capabilities,
        "figures": {
            name: {"title": title, "unit": unit, "value": measured.get(name)}
            for name, (title, unit) in FIGURES.items()
        },
    }


def _test(outcome: Outcome) -> dict[str, Any]:
    told = asdict(outcome)
    kept = {name: told[name] for name in ("id", "outcome", "seconds")}
    return {**kept, "seconds": round(outcome.seconds, 3), "reason": outcome.reason or None}


def exit_code(report: Mapping[str, Any]) -> int:
    """Return OK only where a device was there, and each capability passed or was skipped for a reason."""
    if report["device"] is None:
        return NO_DEVICE
    statuses = {one["status"] for one in report["capabilities"]}
    return FAILED if statuses & {"failed", "not run"} or "passed" not in statuses else OK


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the device, a row for each capability, and the figures."""
    device = report["device"]
    if device is None:
        console.print(f"no device: {report['reason']}", soft_wrap=True, highlight=False, markup=False)
        return
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    table = Table("capability", "status", "tests", "seconds", "reason", title=f"{device['name']}, {versions}")
    for one in report["capabilities"]:
        counts = Counter(test["outcome"] for test in one["tests"])
        tests = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
        status = f"[{_STYLES[one['status']]}]{one['status']}[/]"
        table.add_row(one["title"], status, tests, f"{one['seconds']:.1f}", _plain(one["reason"] or ""))
    console.print(table)
    for figure in report["figures"].values():
        value = "not measured" if figure["value"] is None else f"{figure['value']:.3f} ({figure['unit']})"
        console.print(f"{figure['title']}: {value}", soft_wrap=True, highlight=False, markup=False)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def in_markdown(report: Mapping[str, Any]) -> str:
    """Return the table of docs/gpu.md."""
    device, versions = report["device"], report["versions"]
    if device is None:
        return "No device has been seen yet.\n"
    lines = [
        f"{device['name']} (compute capability {device['capability']}, {device['memory_gib']} GiB,"
        f" {device['count']} of them), driver {device['driver']}, CUDA {versions['cuda']},"
        f" NCCL {versions['nccl']}, torch {versions['torch']}.",
        "",
        "| capability | status | seconds | reason |",
        "|---|---|---|---|",
    ]
    for one in report["capabilities"]:
        reason = (one["reason"] or "").replace("|", "/")
        lines.append(f"| {one['title']} | {one['status']} | {one['seconds']:.1f} | {reason} |")
    lines += ["", "| figure | value | unit |", "|---|---|---|"]
    for figure in report["figures"].values():
        value = "not measured" if figure["value"] is None else f"{figure['value']:.3f}"
        lines.append(f"| {figure['title']} | {value} | {figure['unit']} |")
    return "\n".join(lines) + "\n"


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _SECONDS = {"type": "string", "minLength": 1}, {"type": "number", "minimum": 0}
_TEXT_OR_NULL = {"type": ["string", "null"], "minLength": 1}
_DEVICE = _object(
    name=_TEXT,
    capability=_TEXT,
    memory_gib={"type": "number"},
    count={"type": "integer", "minimum": 1},
    driver=_TEXT_OR_NULL,
)
_CAPABILITY = _object(
    name={"enum": list(CAPABILITIES)},
    title=_TEXT,
    status={"enum": list(_STATUSES)},
    reason=_TEXT_OR_NULL,
    seconds=_SECONDS,
    tests={
        "type": "array",
        "items": _object(id=_TEXT, outcome={"enum": list(_OUTCOMES)}, seconds=_SECONDS, reason=_TEXT_OR_NULL),
    },
)
_FIGURE = _object(title=_TEXT, unit=_TEXT, value={"type": ["number", "null"]})
SCHEMA = _object(
    format={"const": FORMAT},
    device={"anyOf": [{"type": "null"}, _DEVICE]},
    reason=_TEXT_OR_NULL,
    versions=_object(**dict.fromkeys(("springtide", "torch", "cuda", "nccl", "python"), _TEXT_OR_NULL)),
    seconds=_SECONDS,
    capabilities={
        "type": "array",
        "items": _CAPABILITY,
        "minItems": len(CAPABILITIES),
        "maxItems": len(CAPABILITIES),
    },
    figures=_object(**dict.fromkeys(FIGURES, _FIGURE)),
)
"""JSON Schema of build/gpu/report.json."""
