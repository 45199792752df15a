import io
from pathlib import Path

import pytest

from springtide_cli.errors import Refused
from springtide_cli.manifest import Changes, parse, read, with_changes

JOB = "apiVersion: springtide.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\nspec: {}\n"
MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\n"


def test_one_job_may_come_with_what_it_needs_in_order() -> None:
    for text in (
        f"---\n{MAP}---\n{JOB}---\n",
        f"apiVersion: v1\nkind: List\nitems:\n- {flow(MAP)}\n- {flow(JOB)}\n",
    ):
        manifest = parse(text, "job.yaml")
        assert [obj["kind"] for obj in manifest.objects] == ["ConfigMap", "TrainingJob"]
        assert manifest.job is manifest.objects[1]


def flow(text: str) -> str:
    return "{" + ", ".join(text.strip().splitlines()) + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: the manifest is empty"),
        ("---\n---\n", "job.yaml: the manifest is empty"),
        ("a: [1\nb: 2", r"job.yaml: malformed YAML in line 2, column 2: expected ',' or '\]'"),
        ("a: b: c", "malformed YAML in line 1, column 5: mapping values are not allowed here"),
        ("a: \t- b\n\x00", "malformed YAML"),
        ("x: &a [*b]", "malformed YAML in line 1, column 8: found undefined alias 'b'"),
        ("just text", "job.yaml: not a Kubernetes object, but plain text"),
        ("- 1", "not a Kubernetes object, but a list"),
        ("kind: TrainingJob", "job.yaml: apiVersion is missing"),
        ("apiVersion: 1\nkind: X", "apiVersion is missing"),
        ("apiVersion: v1", "job.yaml: kind is missing"),
        ("apiVersion: v1\nkind: Pod", "job.yaml: metadata.name is missing"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: 7}", "metadata.name must be a string, got 7; quote it"),
        (f"{JOB}---\nkind: Pod", "job.yaml, document 2: apiVersion is missing"),
        ("apiVersion: v1\nkind: List\nitems: [3]", "job.yaml, item 1: not a Kubernetes object, but a number"),
        (MAP, r"job.yaml: no TrainingJob of springtide.dev in it, only ConfigMap \(v1\)"),
        (
            "apiVersion: kubeflow.org/v1\nkind: TrainingJob\nmetadata: {name: a}",
            r"no TrainingJob of springtide.dev in it, only TrainingJob \(kubeflow.org/v1\)",
        ),
        (f"{JOB}---\n{JOB.replace('digits', 'two')}", r"2 jobs in it \(digits, two\); run follows one"),
    ],
)
def test_what_cannot_be_run_is_one_clear_message(text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse(text, "job.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"missing\.yaml: there is no such file"):
        read(str(tmp_path / "missing.yaml"))
    with pytest.raises(Refused, match="Is a directory"):
        read(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match="not a text file"):
        read(str(tmp_path / "binary"))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(JOB))
    assert parse(read("-"), "standard input").job["metadata"]["name"] == "digits"


def test_the_command_line_names_a_template_and_standbys() -> None:
    manifest = parse(f"{MAP}---\n{JOB}", "job.yaml")
    assert with_changes(manifest, Changes()) is manifest
    made = with_changes(manifest, Changes("gpu", 2))
    assert made.job is made.objects[1]
    assert made.objects[0] is manifest.objects[0]
    assert made.job["spec"] == {
        "templateRef": {"kind": "ClusterTrainingTemplate", "name": "gpu"},
        "workers": {"standby": 2},
    }
    assert manifest.job["spec"] == {}


def test_the_command_line_changes_nothing_else_of_a_job() -> None:
    workers = "workers: {replicas: 3, standby: 1}"
    spec = f"spec: {{templateRef: {{name: cpu, kind: TrainingTemplate}}, {workers}, suspend: true}}"
    manifest = parse(JOB.replace("spec: {}", spec), "job.yaml")
    made = with_changes(manifest, Changes("TrainingTemplate/gpu", 0)).job["spec"]
    assert made == {
        "templateRef": {"kind": "TrainingTemplate", "name": "gpu"},
        "workers": {"replicas": 3, "standby": 0},
        "suspend": True,
    }


@pytest.mark.parametrize(
    ("job", "changes", "message"),
    [
        (JOB, Changes("Pod/gpu"), "--template: 'Pod/gpu' names no template"),
        (JOB.replace("spec: {}", "spec: 3"), Changes("gpu"), "TrainingJob.spec is a number"),
        (JOB.replace("{}", "{workers: [1]}"), Changes(standby=1), "TrainingJob.spec.workers is a list"),
    ],
)
def test_changes_that_cannot_be_made(job: str, changes: Changes, message: str) -> None:
    with pytest.raises(Refused) as caught:
        with_changes(parse(job, "job.yaml"), changes)
    assert message in str(caught.value)
