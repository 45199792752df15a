"""`make demo`: sets everything up, tells the story, writes the report, and leaves nothing running."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from springtide_demo import prometheus, reference, report, timeline
from springtide_demo.commits import Commit
from springtide_demo.kube import Kube, load
from springtide_demo.machine import Machine
from springtide_demo.manifest import Sample, read_sample, with_step_logs
from springtide_demo.observe import PodView, pod_view
from springtide_demo.patience import Patience
from springtide_demo.steplog import StepLogs
from springtide_demo.story import OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Story, StoryError
from springtide_demo.survivors import unexpected_ends
from springtide_demo.view import View
from springtide_kube.errors import ApiError
from springtide_local.cluster import Cluster, ClusterError
from springtide_local.settings import Settings

Result = TypeVar("Result")

NAMESPACE = "default"
# Seconds of a machine of our own without anything new (see `patience`).
READY_SECONDS = 40.0
CLUSTER_SECONDS = 180.0  # nothing of a cluster that starts can be seen moving


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every promise was kept, 1 when one was broken or the demo failed, 130 on Ctrl-C.

    A promise about seconds that was missed is shown as slow and fails nothing, since training went on; missed
    while others had the machine it is not judged, and says so.
    """
    options = _options(arguments)
    root = _root()
    if root is None:
        print(
            "springtide demo: run it in a checkout (deploy/samples/digits-allreduce.yaml is not here)",
            file=sys.stderr,
        )
        return 1
    if sys.platform != "linux":
        print(
            f"springtide demo: its embedded cluster needs Linux, and this is {sys.platform}", file=sys.stderr
        )
        return 1
    out = (root / options.out).resolve()
    signal.signal(signal.SIGTERM, _terminated)
    Cluster(out / "cluster").stop()  # of a demo that was killed by force
    for name in ("steps", "alone", "cluster", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("report.json", "timeline.svg", "metrics.json", "panels.json"):
        (out / name).unlink(missing_ok=True)
    (out / "steps").mkdir(parents=True)
    try:
        with View() as view:
            result, lines = _tell(view, root, out)
        view.verdict(lines, [str(out / "report.json"), str(out / "timeline.svg")])
        return result
    except (StoryError, ApiError, ClusterError, ValueError, RuntimeError, TimeoutError, OSError) as error:
        print(f"springtide demo: {error}\nwhat was seen lies in {out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been stopped", file=sys.stderr)
        return 130


def _tell(view: View, root: Path, out: Path) -> tuple[int, list[report.Promise]]:
    sample = read_sample(load(root / "deploy/samples/digits-allreduce.yaml"))
    view.say("an undisturbed run of the same script in one process: its loss curve is the measure", "bold")
    # No pause: it stands for work, and changes no number.
    env = {**sample.env, "DIGITS_PAUSE_SECONDS": "0"}
    alone = reference.start(sample.command, env, root, out / "alone")
    try:
        view.say(
            "starts the embedded cluster: an API server, a scheduler and a kubelet in one process", "bold"
        )
        with (
            Cluster.start(
                out / "cluster", Settings(nodes=4, pod_logs=str(out / "logs")), timeout=CLUSTER_SECONDS
            ) as cluster,
            Kube(cluster.kubeconfig) as kube,
            _watched(view, cluster.kubeconfig, root, out),
        ):
            machine = Machine()
            _install(view, kube, root, machine)
            story = _run_job(view, kube, sample, out, alone, machine)
            written = _report(story, alone.curve(machine=machine), out)
            view.say("stops the cluster", "bold")
    finally:
        alone.stop()
    lines = report.promises(written)
    return int(any(line.broken for line in lines)), lines


def _watched(view: View, kubeconfig: Path, root: Path, out: Path) -> contextlib.AbstractContextManager[None]:
    """Start a Prometheus that watches, with PROMETHEUS=1 in the environment."""
    if os.environ.get("PROMETHEUS", "") in ("", "0"):
        return contextlib.nullcontext()
    return prometheus.beside(kubeconfig, root / "deploy/grafana/springtide.json", out, view.say)


def _install(view: View, kube: Kube, root: Path, machine: Machine) -> None:
    view.say("installs the operator as on any cluster: deploy/crd, deploy/operator.yaml", "bold")
    for path in (*sorted((root / "deploy/crd").glob("*.yaml")), root / "deploy/operator.yaml"):
        applied = until(partial(kube.apply_file, path), f"{path.name} to be accepted", machine)
        view.say(f"    applied {', '.join(applied)}", "dim")
    seen: list[PodView] = []

    def ready() -> bool:
        seen[:] = [pod_view(pod) for pod in kube.pods(OPERATOR_NAMESPACE, OPERATOR_SELECTOR)]
        return any(pod.ready for pod in seen)

    until(
        ready,
        "the operator's pod to be ready",
        machine,
        marks=lambda: [(p.uid, p.phase, p.pid) for p in seen],
    )
    view.say("the operator is ready", "green")


def _run_job(
    view: View, kube: Kube, sample: Sample, out: Path, alone: reference.ReferenceRun, machine: Machine
) -> Story:
    kube.apply(with_step_logs(sample.job, out / "steps"), NAMESPACE)
    view.say(
        "applies deploy/samples/digits-allreduce.yaml (and asks its workers for a log of their steps)", "bold"
    )
    story = Story(kube, view, StepLogs(out / "steps"), sample.name, NAMESPACE, alone, machine=machine)
    story.run()
    story.history.add(story.logs.poll())
    view.say(f"the job has succeeded: {story.watch.outcome}", "green")
    return story


def _report(story: Story, curve: list[Commit], out: Path) -> dict[str, object]:
    restarted = unexpected_ends(story.watch.processes(), story.targets, story.over_at)
    for process in restarted:
        story.view.say(f"ended although nobody aimed at it: {process}", "bold red")
    (out / "timeline.svg").write_text(timeline.picture(story.history, story.done, story.job))
    story.machine.sample()
    written = report.build(
        story.history.curve(),
        curve,
        story.done,
        story.watch.outcome,
        restarted,
        len(story.history.active()),
        story.machine,
    )
    (out / "report.json").write_text(json.dumps(written, indent=2) + "\n")
    return written


def until(
    attempt: Callable[[], Result],
    what: str,
    machine: Machine,
    marks: Callable[[], list[Hashable]] = list,
    seconds: float = READY_SECONDS,
) -> Result:
    """Repeat until the attempt gives something.

    Args:
        attempt: what is tried.
        what: for the message: what is waited for.
        machine: says what others leave of it.
        marks: what may be new after an attempt: as long as something is, it goes on.
        seconds: in which nothing moves.

    Raises:
        StoryError: nothing moved for so long; it holds the last refusal.
    """
    patience, problem = Patience(seconds), ""
    while True:
        machine.sample()
        try:
            if result := attempt():
                return result
        except ApiError as error:
            problem = f": {error}"
        now, load = time.monotonic(), machine.lately()
        if patience.look(marks(), now, load.others):
            still = f"nothing has moved for {patience.since(now):.0f} s"
            raise StoryError(f"waited for {what}, and {still}{problem} ({load})")
        time.sleep(0.1)


def _terminated(number: int, frame: object) -> NoReturn:
    """End as Ctrl-C would: what was started is stopped on the way out."""
    raise KeyboardInterrupt


def _root() -> Path | None:
    """The checkout: the working directory, or where this file lies."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / "deploy/samples/digits-allreduce.yaml").is_file():
            return folder
    return None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="springtide_demo", description=__doc__)
    parser.add_argument("--out", default="build/demo", help="folder for the report (default build/demo)")
    return parser.parse_args(arguments)
