"""`springtide run` and `springtide follow`: apply a job, follow it live, exit as it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from springtide_cli.apply import JOBS, Applier
from springtide_cli.errors import INTERRUPTED, SUCCEEDED, CliError, Refused
from springtide_cli.follow import Follower
from springtide_cli.kube import KubePort, connect
from springtide_cli.manifest import Changes, Manifest, parse, read, with_changes
from springtide_cli.screen import Screen, make_screen
from springtide_cli.story import Line, Tone
from springtide_kube.errors import ApiRefusal, Unreachable

if TYPE_CHECKING:
    from springtide_kube.client import Client

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """The cluster, and how its jobs are followed. namespace: for objects that name none."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    logs: bool = False
    plain: bool = False
    force_conflicts: bool = False
    local: bool = False
    keep: bool = False


@dataclass
class Progress:
    """How far it got, for what an interrupt has to say."""

    applied: list[str] = field(default_factory=list)
    job: tuple[str, str] | None = None
    code: int | None = None
    again: str = ""


async def apply_all(
    kube: KubePort, manifest: Manifest, options: Options, screen: Screen, progress: Progress
) -> Object:
    """Apply the manifest's objects in order.

    Args:
        kube: the cluster.
        manifest: the checked manifest.
        options: of the command line.
        screen: shows lines.
        progress: notes how far the command has come, for an interruption.

    Returns:
        The job as stored.

    Raises:
        Refused: the cluster refuses an object.
    """
    namespace = options.namespace or kube.namespace
    applier = Applier(kube, namespace, force=options.force_conflicts)
    job: Object | None = None
    for obj in manifest.objects:
        stored, what = await applier.apply(obj)
        label = f"{obj['kind']} {obj['metadata']['name']}"
        progress.applied.append(label)
        screen.say(Line(f"{label} {what}"))
        if obj is manifest.job:
            job = stored
    assert job is not None
    progress.job = (job["metadata"]["namespace"], job["metadata"]["name"])
    return job


async def read_job(kube: KubePort, namespace: str, name: str) -> Object:
    """Read a job.

    Args:
        kube: the cluster.
        namespace: of the job.
        name: of the job.

    Raises:
        Refused: there is no such job.
    """
    try:
        return await kube.request("GET", f"{JOBS}/namespaces/{namespace}/trainingjobs/{name}")
    except ApiRefusal as error:
        raise Refused(error.message) from error


@contextlib.asynccontextmanager
async def _cluster(options: Options, screen: Screen, progress: Progress) -> AsyncIterator[Client]:
    if options.local:
        from springtide_cli.local import embedded

        # A job that failed, or that goes on after an interrupt, needs its cluster.
        def keep() -> bool:
            return options.keep or (progress.job is not None and progress.code != SUCCEEDED)

        async with embedded(screen, keep=keep) as kube:
            yield kube
        return
    kube = await connect(options.kubeconfig, options.context)
    try:
        yield kube
    finally:
        await kube.close()


async def run_manifest(manifest: Manifest, options: Options, screen: Screen, progress: Progress) -> int:
    """Apply a manifest and follow its job to the end.

    Args:
        manifest: the checked manifest.
        options: of the command line.
        screen: shows lines.
        progress: notes how far the command has come, for an interruption.

    Returns:
        The exit code.

    Raises:
        Refused: nothing runs: the cluster refuses an object, or cannot be reached.
    """
    async with _cluster(options, screen, progress) as kube:
        try:
            job = await apply_all(kube, manifest, options, screen, progress)
        except Unreachable as error:
            raise Refused(str(error)) from error
        progress.code = await _follow(kube, job, options, screen)
        return progress.code


@contextlib.asynccontextmanager
async def on_cluster(options: Options) -> AsyncIterator[Client]:
    """A connection to a cluster that is there already. An API server that does not answer is Refused."""
    kubeconfig = options.kubeconfig
    if options.local:
        from springtide_cli.local import running

        kubeconfig = str(running())
    kube = await connect(kubeconfig, options.context)
    try:
        yield kube
    except Unreachable as error:
        raise Refused(str(error)) from error
    finally:
        await kube.close()


async def follow_job(name: str, options: Options, screen: Screen, progress: Progress) -> int:
    """Follow a job that is there to its end.

    Args:
        name: of the job.
        options: of the command line.
        screen: shows lines.
        progress: notes how far the command has come, for an interruption.

    Returns:
        The exit code.

    Raises:
        Refused: there is no such job.
    """
    async with on_cluster(options) as kube:
        namespace = options.namespace or kube.namespace
        job = await read_job(kube, namespace, name)
        progress.job = (namespace, name)
        return await _follow(kube, job, options, screen)


async def _follow(kube: KubePort, job: Object, options: Options, screen: Screen) -> int:
    meta = job["metadata"]
    follower = Follower(kube, screen, logs=options.logs)
    return await follower.follow(meta["namespace"], meta["name"], meta["uid"])


def interrupted(progress: Progress) -> list[Line]:
    """Return lines about the objects that stay behind after an interrupt, and how to go on with them."""
    if progress.job is None:
        done = f"applied so far: {', '.join(progress.applied)}" if progress.applied else "nothing was applied"
        return [Line(f"interrupted; {done}", Tone.BAD)]
    namespace, name = progress.job
    return [
        Line(f"stopped following; the job {name} goes on", Tone.BAD),
        Line(f"follow it again: springtide follow {name} -n {namespace}{progress.again}"),
        Line(f"end it: kubectl delete trainingjobs.springtide.dev {name} -n {namespace}"),
    ]


async def _guarded(work: Coroutine[Any, Any, int]) -> tuple[int, int]:
    """(exit code, signal): SIGINT and SIGTERM cancel the work, so that the screen is put right."""
    caught: list[int] = []
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task, 0
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0], caught[0]
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def execute(
    options: Options,
    console: Console,
    work: Callable[[Screen, Progress], Coroutine[Any, Any, int]],
) -> int:
    """Run one command to its exit code, with every CliError as one message on standard error.

    Args:
        options: of the command line.
        console: prints.
        work: the command itself; returns the exit code.

    Returns:
        The exit code; 130 when it was interrupted.
    """
    progress = Progress(again=" --local" if options.local else "")
    screen = make_screen(console, plain=options.plain)
    try:
        with screen:
            code, caught = asyncio.run(_guarded(work(screen, progress)))
    except KeyboardInterrupt:
        code, caught = INTERRUPTED, signal.SIGINT
    except CliError as error:
        return complain(error)
    if caught:
        screen_end(console, interrupted(progress))
    return code


def complain(error: CliError) -> int:
    """The message on standard error; returns the exit code."""
    screen_end(Console(stderr=True), [Line(f"springtide: {error}", Tone.BAD)])
    return error.code


def screen_end(console: Console, lines: list[Line]) -> None:
    """Print lines below the live view once that is gone.

    Args:
        console: prints.
        lines: in order.
    """
    for line in lines:
        style = "red" if line.tone is Tone.BAD else ""
        console.print(line.text, style=style, markup=False, highlight=False, soft_wrap=True)


def top(options: Options, console: Console, *, seconds: float, once: bool) -> int:
    """Run `springtide top`.

    Args:
        options: of the command line.
        console: prints.
        seconds: between two looks.
        once: look once and end.

    Returns:
        The exit code: 0 also when it is interrupted, since that is how it ends.
    """
    from springtide_cli import top as command

    async def work() -> int:
        kubeconfig = options.kubeconfig
        if options.local:
            from springtide_cli.local import running

            kubeconfig = str(running())
        kube = await connect(kubeconfig, options.context)
        live = console.is_terminal and not options.plain
        try:
            await command.show(kube, options.namespace, console, seconds=seconds, once=once, live=live)
        finally:
            await kube.close()
        return SUCCEEDED

    try:
        code, caught = asyncio.run(_guarded(work()))
    except CliError as error:
        return complain(error)
    return SUCCEEDED if caught == signal.SIGINT else code


def run(path: str, options: Options, console: Console, changes: Changes | None = None) -> int:
    """Run `springtide run`.

    Args:
        path: of the manifest; "-" for standard input.
        options: of the command line.
        console: prints.
        changes: to the manifest's job; None: none.

    Returns:
        The exit code.
    """
    try:
        read_manifest = parse(read(path), "standard input" if path == "-" else path)
        manifest = with_changes(read_manifest, changes or Changes())
    except CliError as error:
        return complain(error)
    return execute(
        options, console, lambda screen, progress: run_manifest(manifest, options, screen, progress)
    )


def follow(name: str, options: Options, console: Console) -> int:
    """Run `springtide follow`.

    Args:
        name: of the job.
        options: of the command line.
        console: prints.

    Returns:
        The exit code.
    """
    return execute(options, console, lambda screen, progress: follow_job(name, options, screen, progress))
