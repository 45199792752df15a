import asyncio
import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from springtide_cli import local
from springtide_cli.errors import Refused
from springtide_cli.install import InstallError
from springtide_cli.screen import PlainScreen
from springtide_local.cluster import ClusterError


class FakeCluster:
    def __init__(self, folder: Path, *, running: bool) -> None:
        self.files = SimpleNamespace(data=folder, state=folder / "state.json")
        self.running = running
        self.url = "https://127.0.0.1:6443"
        self.kubeconfig = folder / "kubeconfig"
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        if running:
            self.files.state.touch()

    def start(self, data: Path) -> None:
        assert data == self.files.data
        self.calls.append("start")
        assert self.go_on.wait(60)
        if self.error:
            raise self.error
        self.running = True
        self.files.state.touch()

    def stop(self) -> None:
        self.calls.append("stop")
        self.running = False


class FakeConnection:
    closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> FakeConnection:
    made = FakeConnection()

    async def connect(path: str) -> FakeConnection:
        return made

    async def install(kube: object) -> None:
        assert kube is made

    monkeypatch.setattr(local, "connect", connect)
    monkeypatch.setattr(local, "install", install)
    return made


def use(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> tuple[PlainScreen, io.StringIO]:
    monkeypatch.setattr(local, "embedded_cluster", lambda: cluster)
    out = io.StringIO()
    return PlainScreen(Console(file=out, width=200)), out


@pytest.mark.parametrize("keep", [False, True])
async def test_what_was_started_is_stopped_unless_it_is_to_be_kept(
    keep: bool, tmp_path: Path, connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path, running=False)
    screen, out = use(cluster, monkeypatch)
    async with local.embedded(screen, keep=lambda: keep):
        assert cluster.calls == ["start"]
        assert not connection.closed
    assert cluster.calls == (["start"] if keep else ["start", "stop"])
    assert connection.closed
    assert ("springtide local stop" in out.getvalue()) == keep
    assert (f"export KUBECONFIG={tmp_path}/kubeconfig" in out.getvalue()) == keep


async def test_a_cluster_that_ran_before_goes_on(
    tmp_path: Path, connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path, running=True)
    screen, out = use(cluster, monkeypatch)
    async with local.embedded(screen, keep=lambda: False):
        pass
    assert cluster.calls == []
    assert "uses the embedded cluster" in out.getvalue()


async def test_a_cluster_that_does_not_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path, running=False)
    cluster.error = ClusterError("Linux only")
    with pytest.raises(Refused, match="cannot be started: Linux only"):
        async with local.embedded(use(cluster, monkeypatch)[0], keep=lambda: False):
            pass
    assert cluster.calls == ["start"]


async def test_operator_not_getting_ready_takes_its_cluster_along(
    tmp_path: Path, connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(kube: object) -> None:
        raise InstallError("Deployment springtide-operator is not ready")

    monkeypatch.setattr(local, "install", broken)
    cluster = FakeCluster(tmp_path, running=False)
    with pytest.raises(InstallError):
        async with local.embedded(use(cluster, monkeypatch)[0], keep=lambda: False):
            pass
    assert cluster.calls == ["start", "stop"]
    assert connection.closed


async def test_an_interrupt_while_the_cluster_starts_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path, running=False)
    cluster.go_on.clear()
    screen, _ = use(cluster, monkeypatch)

    async def enter() -> None:
        async with local.embedded(screen, keep=lambda: False):
            raise AssertionError("it was interrupted")

    task: asyncio.Task[Any] = asyncio.create_task(enter())
    async with asyncio.timeout(60):
        while not cluster.calls:  # noqa: ASYNC110 (a thread sets it)
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.01)
    cluster.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster.calls == ["start", "stop"]


def test_the_running_cluster_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeCluster(tmp_path, running=True), monkeypatch)
    assert local.running() == tmp_path / "kubeconfig"
    (tmp_path / "state.json").unlink()
    with pytest.raises(Refused, match="springtide local start"):
        local.running()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "springtide_local.cluster", None)
    with pytest.raises(Refused, match=r"pip install 'springtide\[local\]'"):
        local.running()
