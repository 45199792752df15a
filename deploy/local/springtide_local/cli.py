"""`springtide local`: the embedded cluster from the command line."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from springtide_local.cluster import START_TIMEOUT, Cluster, ClusterError
from springtide_local.settings import NodeTimes, Settings

app = typer.Typer(
    name="local",
    help="A Kubernetes cluster in one process on this machine: real kubectl, pods as local processes.",
    no_args_is_help=True,
)
node = typer.Typer(help="Make a node of the embedded cluster fail, and bring it back.", no_args_is_help=True)
image = typer.Typer(help="Images that the embedded cluster's kubelet knows.", no_args_is_help=True)
app.add_typer(node, name="node")
app.add_typer(image, name="image")

Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="The cluster's folder. [default: $XDG_STATE_HOME/springtide/local]", show_default=False
    ),
]
Name = Annotated[str, typer.Argument(help="The node's name, as in `kubectl get nodes`.")]


def _fail(error: Exception) -> NoReturn:
    print(f"springtide local: {error}", file=sys.stderr)
    raise typer.Exit(1)


@app.command()
def start(
    data: Data = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 3,
    cpus: Annotated[str, typer.Option(help="CPUs of each node, as a quantity; said, not enforced.")] = "8",
    memory: Annotated[
        str, typer.Option(help="Memory of each node, as a quantity; said, not enforced.")
    ] = "32Gi",
    gpus: Annotated[int, typer.Option(help="nvidia.com/gpu of each node.")] = 0,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Where to write the kubeconfig.", show_default=False)
    ] = None,
    pod_logs: Annotated[
        Path | None,
        typer.Option(help="Folder to keep the logs of pods in when they are gone.", show_default=False),
    ] = None,
    foreground: Annotated[bool, typer.Option(help="Stay, show the log, stop with Ctrl-C.")] = False,
    heartbeat: Annotated[float, typer.Option(help="Seconds between two signs of life of a node.")] = 1.0,
    grace: Annotated[float, typer.Option(help="Seconds of silence until a node is NotReady.")] = 4.0,
    toleration: Annotated[
        float, typer.Option(help="The most seconds that pods stay on a NotReady node.")
    ] = 5.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until the cluster is ready.")
    ] = START_TIMEOUT,
) -> None:
    """Start the embedded cluster and print how to reach it."""
    where = str(kubeconfig.expanduser().absolute()) if kubeconfig else ""
    times = NodeTimes(heartbeat, grace, toleration)
    logs = str(pod_logs.expanduser().absolute()) if pod_logs else ""
    settings = Settings(nodes, cpus, memory, gpus, times=times, kubeconfig=where, pod_logs=logs)
    existing = Cluster(data)
    try:
        if existing.running and existing.files.state.exists():
            print(f"The embedded cluster already runs ({existing.url}, process {existing.pid}).")
            print(f"export KUBECONFIG={existing.kubeconfig}")
            return
        cluster = Cluster.start(data, settings, timeout)
    except (ClusterError, ValueError) as error:
        _fail(error)
    print(
        f"The embedded cluster runs: {cluster.url}, {nodes} nodes. Stop it with: springtide local "
        f"stop{_data(data)}"
    )
    print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
    if foreground:
        _follow(cluster)


@app.command()
def status(data: Data = None) -> None:
    """Say whether the embedded cluster runs, and how its nodes are. Exit status 3 when it does not run."""
    cluster = Cluster(data)
    if not cluster.running:
        print(f"The embedded cluster does not run (folder {cluster.files.data}).")
        raise typer.Exit(3)
    try:
        state = cluster.state
        found = cluster.request("GET", "/api/v1/nodes")["items"]
        pods = cluster.request("GET", "/api/v1/pods")["items"]
    except ClusterError as error:
        _fail(error)
    minutes = (time.time() - state["started"]) / 60
    print(
        f"The embedded cluster runs: {state['url']}, process {state['pid']}, for {minutes:.0f} min, "
        f"addresses {state['network']}."
    )
    for one in found:
        name = one["metadata"]["name"]
        ready = next((c["status"] for c in one["status"]["conditions"] if c["type"] == "Ready"), "Unknown")
        count = sum(
            pod["spec"].get("nodeName") == name and pod["status"].get("phase") not in ("Succeeded", "Failed")
            for pod in pods
        )
        cordoned = ", cordoned" if one["spec"].get("unschedulable") else ""
        print(f"  {name}: {'Ready' if ready == 'True' else 'NotReady'}{cordoned}, {count} pods")
    print(f"export KUBECONFIG={state['kubeconfig']}")


@app.command()
def stop(data: Data = None) -> None:
    """Stop the embedded cluster and every process in it."""
    cluster = Cluster(data)
    if not cluster.running:
        print(f"The embedded cluster does not run (folder {cluster.files.data}).")
        return
    try:
        cluster.stop()
    except ClusterError as error:
        _fail(error)
    print("The embedded cluster is stopped.")


@node.command("kill")
def node_kill(name: Name, data: Data = None) -> None:
    """Kill all processes of a node at once and let its heartbeat end. The kernel tells their peers."""
    try:
        Cluster(data).kill_node(name)
    except ClusterError as error:
        _fail(error)
    print(f"Node {name} is dead. Bring it back with: springtide local node restore {name}{_data(data)}")


@node.command("crash")
def node_crash(name: Name, data: Data = None) -> None:
    """Let a node's machine lose power: its processes are gone, and its addresses are silent."""
    try:
        Cluster(data).crash_node(name)
    except ClusterError as error:
        _fail(error)
    print(f"Node {name} has crashed. Bring it back with: springtide local node restore {name}{_data(data)}")


@node.command("stop")
def node_stop(name: Name, data: Data = None) -> None:
    """Stop all processes of a node (SIGSTOP) and its heartbeat, as when a machine hangs or loses its
    network.
    """
    try:
        Cluster(data).stop_node(name)
    except ClusterError as error:
        _fail(error)
    print(f"Node {name} is stopped. Bring it back with: springtide local node restore {name}{_data(data)}")


@node.command("restore")
def node_restore(name: Name, data: Data = None) -> None:
    """Bring a node back that failed, and wait until it is Ready."""
    try:
        Cluster(data).restore_node(name)
    except ClusterError as error:
        _fail(error)
    print(f"Node {name} is Ready.")


@image.command("add")
def image_add(
    name: Annotated[
        str, typer.Argument(help="The image's name as in manifests; without a tag it stands for every tag.")
    ],
    python: Annotated[
        Path, typer.Option(help="The Python interpreter of the environment; its folder comes first on PATH.")
    ],
    root: Annotated[Path, typer.Option(help="The folder that is the working directory.")],
    data: Data = None,
) -> None:
    """Let the kubelet know an image: a Python environment and a folder."""
    try:
        Cluster(data).add_image(name, python, root)
    except ValueError as error:
        _fail(error)
    print(f"Image {name} is known to the embedded cluster.")


def _data(data: Path | None) -> str:
    return f" --data {data}" if data is not None else ""


def _follow(cluster: Cluster) -> None:
    """Show the log until the cluster ends or somebody stops us, then stop it."""

    # A plain mark: an exception that is raised in a finalizer is lost, and an Event set by a handler can wait
    # for its own lock. Both signals, since whoever started this process may have had SIGINT ignored.
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    with open(cluster.files.log, errors="replace") as log:
        while cluster.running and not stopping:
            text = log.read()
            if text:
                print(text, end="", flush=True)
            else:
                time.sleep(0.1)
        print(log.read(), end="", flush=True)
    if stopping:
        cluster.stop()
        return
    print("springtide local: the embedded cluster has ended", file=sys.stderr)
    raise typer.Exit(1)
