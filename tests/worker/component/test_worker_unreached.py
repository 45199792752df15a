"""Jobs whose workers do not reach a parameter server that reaches the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cut_proxy import CutProxy, ports_of
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 5, "pace": 0.015, "clip_norm": 0.5}
PORT = 7080

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS)


@pytest.fixture
def begin(
    new_server_cluster: Callable[..., WorkerCluster],
) -> Iterator[Callable[..., tuple[WorkerCluster, list[CutProxy]]]]:
    """A job with three servers; workers, and the servers among themselves, reach each through a proxy."""
    proxies: list[CutProxy] = []

    def make(replication: int, **environment: str) -> tuple[WorkerCluster, list[CutProxy]]:
        cluster = new_server_cluster(
            OPTIONS, 3, replication, environment={"SPRINGTIDE_CONNECT_SECONDS": "2", **environment}
        )

        def front(slot: int, address: str) -> str:
            seen = f"{cluster.net}.{230 + len(proxies)}"
            proxies.append(CutProxy((address, PORT), (seen, PORT)))
            return seen

        cluster.front_of = front
        return cluster, proxies

    yield make
    for proxy in proxies:
        proxy.close()


def number(cluster: WorkerCluster) -> int:
    return 0 if cluster.reply is None else cluster.reply.generation.number


@pytest.mark.slow
def test_where_others_have_copies_the_job_goes_on_without_it(
    begin: Callable[..., tuple[WorkerCluster, list[CutProxy]]], undisturbed: Reference
) -> None:
    cluster, proxies = begin(2)
    workers = cluster.start(2)
    cluster.until_step(6)
    cluster.until(lambda: cluster.reply is not None and cluster.reply.servers_settled, "the copies")
    proxies[1].cut()
    cluster.until(lambda: not cluster.servers[1].running, "the end of the server that nobody reaches")
    assert "most workers could not reach parameter server ps-1-1" in cluster.logs()
    cluster.add_server(1)
    cluster.until_done()
    check(cluster, undisturbed, workers)


@pytest.mark.slow
def test_without_copies_it_is_waited_for_and_costs_nothing(
    begin: Callable[..., tuple[WorkerCluster, list[CutProxy]]], undisturbed: Reference
) -> None:
    cluster, proxies = begin(1)
    workers = cluster.start(2)
    cluster.until_step(6)
    proxies[1].cut()
    cluster.until(lambda: number(cluster) >= 6, "the fifth generation that cannot begin")
    assert f"parameter server {cluster.net}.231:{PORT} cannot be reached" in cluster.logs()
    assert all(server.running for server in cluster.servers)
    assert all(worker.running for worker in workers)
    proxies[1].heal()
    cluster.until_done()
    check(cluster, undisturbed, workers)


@pytest.mark.slow
def test_workers_that_do_not_step_together_go_on_without_it(
    begin: Callable[..., tuple[WorkerCluster, list[CutProxy]]],
) -> None:
    cluster, proxies = begin(2, SPRINGTIDE_CONSISTENCY="Asynchronous")
    workers = cluster.start(2)
    cluster.until_step(6)
    cluster.until(lambda: cluster.reply is not None and cluster.reply.servers_settled, "the copies")
    proxies[1].cut()
    cluster.until(lambda: not cluster.servers[1].running, "the end of the server that nobody reaches")
    cluster.until_done()
    for worker in workers:
        assert worker.code == 0, cluster.logs()
        data = worker.outcome().data  # type: ignore[union-attr]
        assert (data["repeated"], data["lost"]) == (0, 0)


@pytest.mark.slow
def test_one_that_joins_meanwhile_costs_the_only_holder_nothing(
    begin: Callable[..., tuple[WorkerCluster, list[CutProxy]]], undisturbed: Reference
) -> None:
    """A joiner has not found out yet that the server cannot be reached: that is no word against who has."""
    cluster, proxies = begin(1)
    [holder] = cluster.start(1)
    cluster.until_step(6)
    proxies[1].cut(reset=True)
    cluster.until(lambda: number(cluster) >= 2, "the first generation that cannot begin")
    joiner = cluster.add()
    cluster.until(lambda: number(cluster) >= 6, "the fifth generation that cannot begin")
    assert holder.running, cluster.logs()
    assert joiner.running, cluster.logs()
    proxies[1].heal()
    cluster.until_done()
    check(cluster, undisturbed, [holder, joiner])
    assert cluster.reply is not None
    assert not cluster.reply.states_lost


@pytest.mark.slow
def test_one_that_alone_does_not_reach_a_server_is_cut_off(
    begin: Callable[..., tuple[WorkerCluster, list[CutProxy]]], undisturbed: Reference
) -> None:
    cluster, proxies = begin(1)
    workers = cluster.start(3)
    cluster.until_step(6)
    alone = workers[1]
    proxies[1].cut(lambda port: port in ports_of(alone.pid), reset=True)
    cluster.until(lambda: not alone.running, "the end of the one that does not reach a server")
    assert f"{alone.name} was complained of" in cluster.logs()
    others = [worker for worker in workers if worker is not alone]
    cluster.until_done(*others)
    check(cluster, undisturbed, others)
