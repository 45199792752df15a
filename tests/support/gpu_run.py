"""Run all tests that need a CUDA device, and report what works there: `make gpu`.

Each capability's tests run in a process of their own, since an error on a device may leave its process
useless. A test that does not end within its limit is ended with its process, whose stacks are printed first;
those behind it go on in another one. It begins no capability once the time of the whole run is over.

Exit codes: 0 all that could run passed; 1 something failed or did not run; 3 there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_capabilities import CAPABILITIES, files_with_gpu_tests
from gpu_plugin import EVENTS_VARIABLE
from gpu_report import Outcome, exit_code, in_markdown, make_report, print_report
from rich.console import Console

_SUPPORT = Path(__file__).resolve().parent
ROOT = _SUPPORT.parents[1]
TEST_SECONDS = 100.0
START_SECONDS = 90.0
"""Time until the first test of a process begins: importing torch, and fixtures of the session."""
RUN_SECONDS = 440.0
_GRACE_SECONDS = 20.0
"""How long a test that runs at the end of the run may go on."""
_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 3.0


@dataclass
class Limits:
    """Seconds: of a test, of a process until its first test, and of the whole run."""

    test: float = TEST_SECONDS
    start: float = START_SECONDS
    run: float = RUN_SECONDS


@dataclass
class Found:
    """Collect what was run. not_run: by capability, why tests of it did not begin."""

    outcomes: list[Outcome] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


class Run:
    """One run over the files. environment: of the tests' processes, besides this one's."""

    def __init__(
        self, files: Sequence[Path], limits: Limits, root: Path = ROOT, environment: Mapping[str, str] = {}
    ) -> None:
        self._files, self._limits, self._root = list(files), limits, root
        self._environment = dict(environment)
        self._deadline = time.monotonic() + limits.run

    def all(self) -> Found:
        """Run everything."""
        found = Found()
        collected, trouble = self._collect()
        if trouble:
            found.not_run = dict.fromkeys(CAPABILITIES, trouble)
            return found
        for capability in CAPABILITIES:
            tests = collected.get(capability, [])
            while tests:
                if time.monotonic() > self._deadline:
                    found.not_run[capability] = (
                        f"{len(tests)} tests did not begin: the {self._limits.run:.0f} s of the run were over"
                    )
                    break
                ended = self._some(capability, tests)
                if not ended:
                    found.not_run[capability] = f"the process of its tests did not come to {tests[0]}"
                    break
                found.outcomes += ended
                done = {outcome.id for outcome in ended}
                tests = [test for test in tests if test not in done]
        return found

    def _collect(self) -> tuple[dict[str, list[str]], str]:
        """Return the tests by capability, and what went wrong ("" for nothing)."""
        tests: dict[str, list[str]] = {}
        arguments = ["--collect-only", "-qq", *map(str, self._files)]
        with self._process(arguments, quiet=True) as (process, events):
            try:
                code = process.wait(self._limits.start)
            except subprocess.TimeoutExpired:
                return {}, f"the tests were not collected within {self._limits.start:.0f} s"
            for event in events.read():
                tests.setdefault(event["capability"], []).append(event["id"])
        if code not in (0, 5):  # 5: there are none
            return {}, f"the tests could not be collected: pytest ended with {code}"
        return tests, ""

    def _some(self, capability: str, tests: Sequence[str]) -> list[Outcome]:
        """Run the tests in one process until it ends; return the outcomes of those that began."""
        outcomes: list[Outcome] = []
        running, since = "", time.monotonic()
        cut = ""
        with self._process(["-q", *tests]) as (process, events):
            while True:
                ended = process.poll() is not None
                for event in events.read():
                    if event["event"] == "started":
                        running, since = event["id"], time.monotonic()
                    elif event["event"] == "ended":
                        told = {key: event[key] for key in ("outcome", "seconds", "reason", "figures")}
                        outcomes.append(Outcome(event["id"], capability, **told))
                        running, since = "", time.monotonic()
                if ended:
                    break
                limit = self._limits.test if running or outcomes else self._limits.start
                if time.monotonic() > since + limit:
                    cut = f"it did not end within {limit:.0f} s"
                    break
                if time.monotonic() > self._deadline + _GRACE_SECONDS:
                    cut = f"the {self._limits.run:.0f} s of the run were over"
                    break
                time.sleep(_LOOK_SECONDS)
        if running:
            seconds = time.monotonic() - since
            reason = f"cut off: {cut}" if cut else f"its process ended with {_in_words(process.returncode)}"
            outcomes.append(Outcome(running, capability, "failed", seconds, reason))
        return outcomes

    @contextlib.contextmanager
    def _process(self, arguments: Sequence[str], quiet: bool = False) -> Any:
        """Yield a process of pytest's and its events; it is gone afterwards, with all that it has started."""
        with tempfile.TemporaryDirectory() as folder:
            events = Events(Path(folder) / "events")
            command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-p", "gpu_plugin", "-m", "cuda"]
            # A warning of a driver's or of a compiler's, that nobody has seen here, is no failure.
            command += ["-W", "default", "--timeout", "0", *arguments]
            variables = {
                EVENTS_VARIABLE: str(events.path),
                "PYTHONPATH": os.pathsep.join([str(_SUPPORT), os.environ.get("PYTHONPATH", "")]),
            }
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=os.environ | self._environment | variables,
                stdout=subprocess.DEVNULL if quiet else None,
                start_new_session=True,
            )
            try:
                yield process, events
            finally:
                _end(process)


class Events:
    """The lines that a process of tests writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events that are new."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")[:-1]  # the last one may not be whole
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process and all of its session; one that still runs tells its stacks before (faulthandler)."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STACKS_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_words(code: int) -> str:
    return f"code {code}" if code >= 0 else signal.Signals(-code).name


def find_device() -> tuple[dict[str, Any] | None, str]:
    """Return what the first device is, or None and why there is none."""
    import torch

    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a build without CUDA: install one with it"
    if not torch.cuda.is_available():
        return None, "torch finds no CUDA device: see nvidia-smi, and CUDA_VISIBLE_DEVICES"
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
        "driver": _driver(),
    }, ""


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.strip().splitlines()[0] if told.strip() else None


def find_versions() -> dict[str, str | None]:
    """Return the versions that the report names; None for what this build of torch lacks."""
    import torch

    nccl = None
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "springtide": metadata.version("springtide"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write the report and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of report.json")
    parser.add_argument("--seconds", type=float, default=RUN_SECONDS, help="of the whole run")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    device, reason = find_device()
    versions = find_versions()
    found = Found()
    if device is not None:
        environment = {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # exact mode asks for it, and cuBLAS reads it once
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compiling processes would outlive its test
        }
        found = Run(
            files_with_gpu_tests(ROOT / "tests"), Limits(run=options.seconds), environment=environment
        ).all()
    seconds = time.monotonic() - began
    report = make_report(
        device, versions, found.outcomes, seconds=seconds, reason=reason, not_run=found.not_run
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.out / "table.md").write_text(in_markdown(report))
    print_report(report, Console())
    return exit_code(report)


if __name__ == "__main__":
    sys.exit(main())
