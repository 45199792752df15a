"""The client on a real cluster: the notebook of examples/, and a folder whose script fails."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_start import forked

from springtide.client import JobFailed, TrainingClient
from springtide_demo.kube import Kube
from springtide_local.cluster import Cluster

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the embedded cluster runs on Linux only"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("fork_server"),
    # Of the notebook's client, which is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client"),
]

TEMPLATE = {
    "apiVersion": "springtide.dev/v1alpha1",
    "kind": "ClusterTrainingTemplate",
    "metadata": {"name": "greeting"},
    "spec": {
        "defaults": {
            "failurePolicy": {"backoffLimit": 0},
            "workers": {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "worker",
                                "image": "springtide/worker:0.1.0",
                                "env": [{"name": "GREETING", "value": "of the platform"}],
                            }
                        ]
                    }
                }
            },
        },
        "limits": {"maxReplicas": 1, "images": ["springtide/*"]},
    },
}
NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "notebook.ipynb"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingClient]:
    """A client of a cluster of its own, which the notebook finds and uses."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    try:
        with forked():  # the cluster; the notebook's kernel starts as always
            made = TrainingClient(local=True)
        with made:
            yield made
    finally:
        cluster = Cluster(tmp_path / "state" / "springtide" / "local")
        left = cluster.running
        cluster.stop()
    assert not left


@pytest.mark.slow
def test_notebook_and_folder_on_one_cluster(
    client: TrainingClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The notebook trains through a scale-up; the script's failure comes back with its log."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "uses the embedded cluster that runs" in printed
    assert "Succeeded after 240 steps in generation 2" in printed
    assert "{'slope': 3.0}" in printed
    assert printed.count("the last step was made by 2 workers") == 2
    assert "samples: 3840 seen, 0 repeated, 0 lost" in printed
    assert printed.rstrip().endswith("[]")
    views = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("TrainingJob" in str(view["data"]) or "default/train-" in str(view["data"]) for view in views)

    source = tmp_path / "src"
    (source / "helper").mkdir(parents=True)
    (source / "helper" / "__init__.py").write_text("def told(arguments): return ' '.join(arguments)\n")
    (source / "train.py").write_text(
        textwrap.dedent(
            """
            import os, sys
            from helper import told
            print(told(sys.argv[1:]), os.listdir(), flush=True)
            raise SystemExit("no such data")
            """
        )
    )
    job = client.train(
        "train.py",
        arguments={"lr": 0.1, "amp": True},
        code=source,
        packages=["rich"],
        name="broken",
        spec={"failurePolicy": {"backoffLimit": 0}},
    )
    with pytest.raises(JobFailed, match=r"broken failed \(BackoffLimitExceeded\): .*no such data") as caught:
        job.wait(120, progress=False)
    first, last = caught.value.log.splitlines()
    assert first.startswith("--lr 0.1 --amp [")
    assert "'helper'" in first
    assert last == "no such data"
    job.delete()
    assert client.list() == []

    with Kube(tmp_path / "state" / "springtide" / "local" / "kubeconfig") as cluster:
        cluster.request("POST", "/apis/springtide.dev/v1alpha1/clustertrainingtemplates", TEMPLATE)
    (source / "train.py").write_text("import os\nraise SystemExit(os.environ['GREETING'])\n")
    job = client.train("train.py", code=source, name="templated", template="greeting")
    with pytest.raises(JobFailed, match=r"templated failed \(BackoffLimitExceeded\): .*of the platform"):
        job.wait(120, progress=False)
    job.delete()
