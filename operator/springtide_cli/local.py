"""`--local`: the embedded cluster of this machine, with the operator in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from springtide_cli.errors import Refused
from springtide_cli.install import install
from springtide_cli.kube import connect
from springtide_cli.screen import Screen
from springtide_cli.story import Line, Tone
from springtide_kube.errors import Unreachable

if TYPE_CHECKING:
    from springtide_kube.client import Client
    from springtide_local.cluster import Cluster


def embedded_cluster() -> Cluster:
    try:
        from springtide_local.cluster import Cluster
    except ModuleNotFoundError as error:
        raise Refused(
            f"--local needs the extra [local] ({error}): pip install 'springtide[local]'"
        ) from error
    return Cluster()


def _is_ready(cluster: Cluster) -> bool:
    return cluster.running and cluster.files.state.exists()


def running() -> Path:
    """The kubeconfig of the embedded cluster that runs. Raise Refused when none does."""
    cluster = embedded_cluster()
    if not _is_ready(cluster):
        raise Refused("no embedded cluster runs on this machine: start one with `springtide local start`")
    return cluster.kubeconfig


async def _start(cluster: Cluster, screen: Screen) -> bool:
    """True if it was started here, False if it ran already."""
    from springtide_local.cluster import ClusterError

    if _is_ready(cluster):
        screen.say(Line(f"uses the embedded cluster that runs on this machine ({cluster.url})"))
        return False
    starting = asyncio.ensure_future(asyncio.to_thread(cluster.start, cluster.files.data))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: what it starts must not be left behind.
        await asyncio.wait([starting])
        await asyncio.to_thread(cluster.stop)
        raise
    except (ClusterError, ValueError, OSError) as error:
        raise Refused(f"the embedded cluster cannot be started: {error}") from error
    screen.say(Line(f"started the embedded cluster ({cluster.url})"))
    return True


async def _connect(kubeconfig: Path) -> Client:
    """Connect and see to it that the operator runs."""
    kube = await connect(str(kubeconfig))
    try:
        await install(kube)
    except Unreachable as error:
        await kube.close()
        raise Refused(str(error)) from error
    except BaseException:
        await kube.close()
        raise
    return kube


@contextlib.asynccontextmanager
async def embedded(screen: Screen, *, keep: Callable[[], bool]) -> AsyncIterator[Client]:
    """Yield a connection to the embedded cluster, which is started if none runs.

    A cluster that was started here is stopped at the end, unless `keep()`, asked then, says that there is
    something to look at.

    Args:
        screen: shows what is done.
        keep: whether a cluster that was started here is to stay; asked at the end.

    Raises:
        Refused: the cluster cannot be started or reached.
        InstallError: the operator cannot be installed in it.
    """
    cluster = embedded_cluster()
    started = await _start(cluster, screen)
    try:
        kube = await _connect(cluster.kubeconfig)
        screen.say(Line("the operator is ready"))
        try:
            yield kube
        finally:
            await kube.close()
    finally:
        if started and not keep():
            await asyncio.to_thread(cluster.stop)
            screen.say(Line("stopped the embedded cluster", Tone.QUIET))
        elif started:
            screen.say(Line(f"the embedded cluster goes on: export KUBECONFIG={cluster.kubeconfig}"))
            screen.say(Line("stop it with: springtide local stop"))
