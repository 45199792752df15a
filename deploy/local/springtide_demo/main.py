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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import urllib3

from springtide_demo import prometheus, reference, report, timeline
from springtide_demo.commits import Commit
from springtide_demo.kube import Kube, KubeError, load
from springtide_demo.manifest import Sample, read_sample, with_step_logs
from springtide_demo.observe import pod_view
from springtide_demo.steplog import StepLogs
from springtide_demo.story import OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Story, StoryError
from springtide_demo.survivors import unexpected_ends
from springtide_demo.view import View
from springtide_local.cluster import Cluster, ClusterError
from springtide_local.settings import Settings

Result = TypeVar("Result")

NAMESPACE = "default"
READY_SECONDS = 40.0
STORY_SECONDS = 150.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every promise was kept, 1 when one was broken or the demo failed, 130 on Ctrl-C.

    A promise about seconds that a busy machine missed is shown, and breaks nothing.
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
    for name in ("report.json", "timeline.svg", "metrics.json"):
        (out / name).unlink(missing_ok=True)
    (out / "steps").mkdir(parents=True)
    try:
        with View() as view:
            result, lines = _tell(view, root, out)
        view.verdict(lines, [str(out / "report.json"), str(out / "timeline.svg")])
        return result
    except (StoryError, KubeError, ClusterError, ValueError, RuntimeError, TimeoutError, OSError) as error:
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
            Cluster.start(out / "cluster", Settings(nodes=4, pod_logs=str(out / "logs"))) as cluster,
            Kube(cluster.kubeconfig) as kube,
            _watched(view, cluster.kubeconfig, root, out),
        ):
            _install(view, kube, root)
            story = _run_job(view, kube, sample, out, alone)
            written = _report(story, alone.curve(), out)
            view.say("stops the cluster", "bold")
    finally:
        alone.stop()
    lines = report.promises(written)
    return int(not all(line.holds or line.timing for line in lines)), lines


def _watched(view: View, kubeconfig: Path, root: Path, out: Path) -> contextlib.AbstractContextManager[None]:
    """With PROMETHEUS=1 in the environment, a Prometheus watches."""
    if os.environ.get("PROMETHEUS", "") in ("", "0"):
        return contextlib.nullcontext()
    return prometheus.beside(kubeconfig, root / "deploy/grafana/springtide.json", out, view.say)


def _install(view: View, kube: Kube, root: Path) -> None:
    view.say("installs the operator as on any cluster: deploy/crd, deploy/operator.yaml", "bold")
    for path in (*sorted((root / "deploy/crd").glob("*.yaml")), root / "deploy/operator.yaml"):
        applied = _until(partial(kube.apply_file, path), READY_SECONDS, f"{path.name} to be accepted")
        view.say(f"    applied {', '.join(applied)}", "dim")
    _until(
        lambda: any(pod_view(p).ready for p in kube.pods(OPERATOR_NAMESPACE, OPERATOR_SELECTOR)),
        READY_SECONDS,
        "the operator's pod to be ready",
    )
    view.say("the operator is ready", "green")


def _run_job(view: View, kube: Kube, sample: Sample, out: Path, alone: reference.ReferenceRun) -> Story:
    kube.apply(with_step_logs(sample.job, out / "steps"), NAMESPACE)
    view.say(
        "applies deploy/samples/digits-allreduce.yaml (and asks its workers for a log of their steps)", "bold"
    )
    story = Story(kube, view, StepLogs(out / "steps"), sample.name, NAMESPACE, alone)
    story.run(STORY_SECONDS)
    story.history.add(story.logs.poll())
    view.say(f"the job has succeeded: {story.watch.outcome}", "green")
    return story


def _report(story: Story, curve: list[Commit], out: Path) -> dict[str, object]:
    restarted = unexpected_ends(story.watch.processes(), story.targets, story.over_at)
    for process in restarted:
        story.view.say(f"ended although nobody aimed at it: {process}", "bold red")
    (out / "timeline.svg").write_text(timeline.picture(story.history, story.done, story.job))
    written = report.build(
        story.history.curve(), curve, story.done, story.watch.outcome, restarted, len(story.history.active())
    )
    (out / "report.json").write_text(json.dumps(written, indent=2) + "\n")
    return written


def _until(attempt: Callable[[], Result], seconds: float, what: str) -> Result:
    """Repeat until the attempt gives something. Raises StoryError with the last refusal."""
    deadline = time.monotonic() + seconds
    problem = ""
    while time.monotonic() < deadline:
        try:
            if result := attempt():
                return result
        except (KubeError, urllib3.exceptions.HTTPError) as error:
            problem = f": {error}"
        time.sleep(0.1)
    raise StoryError(f"waited {seconds:.0f} s for {what}{problem}")


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
