"""Code that is packed, code that is refused, and the objects that come of it."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_client import manifest
from springtide_client.errors import SourceError
from springtide_client.packing import MAX_BYTES, flags, keywords, pack, pack_folder
from springtide_operator.api import names
from springtide_operator.api.model import TrainingJobSpec


def train(lr: float, names: Any = None) -> None:
    print(lr, names)


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_a_function_its_arguments_and_packages_are_packed() -> None:
    payload = pack(train, {"lr": 0.1, "names": ["a"]}, ["einops>=0.8"])
    assert payload.name == "train"
    assert json.loads(payload.data["arguments.json"]) == {"lr": 0.1, "names": ["a"]}
    assert json.loads(payload.data["plan.json"]) == {"packages": ["einops>=0.8"], "script": "", "flags": None}
    assert "def train(" in payload.data["script.py"]
    assert "os.execv" in payload.data["boot.py"]


def test_a_script_of_the_folder_is_run_there(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    script = tmp_path / "src" / "train.py"
    script.write_text("print(1)")
    for given_path in ("train.py", script):
        payload = pack(given_path, ["--lr", "0.1"], code=tmp_path / "src")
        plan = json.loads(payload.data["plan.json"])
        assert (plan["script"], plan["flags"]) == ("train.py", ["--lr", "0.1"])
        assert names_in(payload.binary["code.tar.gz"]) == ["train.py"]
        assert "script.py" not in payload.data
    alone = pack(str(script))
    assert alone.data["script.py"] == "print(1)"
    assert alone.fields()["data"] == alone.data
    with pytest.raises(SourceError, match=r"nothing\.py cannot be read: No such file"):
        pack(tmp_path / "nothing.py")
    with pytest.raises(SourceError, match="is no folder"):
        pack(train, {"lr": 1}, code=tmp_path / "nowhere")


def test_a_folder_is_packed_without_caches_and_always_equally(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "pkg/b.py",
        ".git/x",
        "pkg/__pycache__/b.pyc",
        "env/pyvenv.cfg",
        "env/lib.py",
        ".env",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "a.py").chmod(0o700)
    archive, sizes = pack_folder(tmp_path)
    assert names_in(archive) == ["a.py", "pkg/b.py"]
    assert sizes == {"a.py": 4, "pkg/b.py": 8}
    os.utime(tmp_path / "a.py", (1, 1))
    assert pack_folder(tmp_path)[0] == archive


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="link that leads out of the folder"):
        pack_folder(tmp_path / "src")
    (tmp_path / "src" / "link").unlink()
    (tmp_path / "src" / "folder").symlink_to(tmp_path)
    with pytest.raises(SourceError, match="is a link to a folder"):
        pack_folder(tmp_path / "src")


def test_code_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("x")
    (tmp_path / "weights.bin").write_bytes(os.urandom(MAX_BYTES + 1))
    with pytest.raises(SourceError, match=r"holds 1,048,576; its largest files are weights\.bin .*image="):
        pack(train, {"lr": 1}, code=tmp_path)
    with pytest.raises(SourceError, match=r"a ConfigMap holds 1,048,576: keep data out"):
        pack(train, {"lr": 1, "names": "x" * MAX_BYTES})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "train cannot be called with these arguments: missing a required argument: 'lr'"),
        ({"lr": 1, "rate": 2}, "unexpected keyword argument 'rate'"),
        (
            {"lr": {"a": [object()]}},
            r"train's argument 'lr'\['a'\]\[0\] is a builtins\.object: arguments travel",
        ),
        ({"lr": {1: 2}}, "has the key 1, and keys of JSON are text"),
        ({"lr": float("inf")}, "is inf, which JSON does not have"),
        (["--lr"], "are a dictionary of its keywords"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        keywords(train, arguments)


def test_flags_are_as_on_a_command_line() -> None:
    given_flags = {"lr": 0.1, "amp": True, "slow": False, "none": None, "sizes": [1, 2], "name": "a b"}
    assert flags(given_flags) == ["--lr", "0.1", "--amp", "--sizes", "1", "2", "--name", "a b"]
    assert flags(["-x", 1]) == ["-x", "1"]  # type: ignore[list-item]
    with pytest.raises(SourceError, match="write arguments="):
        flags("--lr 0.1")
    with pytest.raises(SourceError, match="'data' is a dict"):
        flags({"data": {}})
    with pytest.raises(SourceError, match=r'write packages=\["einops"\]'):
        pack(train, {"lr": 1}, "einops")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=25)
@given(JSON, JSON)
def test_merging_gives_theirs_where_they_say_it(ours: Any, theirs: Any) -> None:
    found = manifest.merged(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert set(found) == set(ours) | set(theirs)
        assert all(found[key] == ours[key] for key in set(ours) - set(theirs))
        assert all(found[key] == theirs[key] for key in set(theirs) - set(ours))
    else:
        assert found == theirs
    assert manifest.merged(ours, ours) == ours


def test_the_job_is_one_that_the_operator_takes() -> None:
    options = manifest.JobOptions(
        workers=(2, 8),
        resources={"cpu": 2, "nvidia.com/gpu": 1},
        strategy={"type": "AllReduce", "allReduce": {"exact": True}},
        env={"A": "b"},
        pod={"nodeSelector": {"zone": "x"}, "containers": [{"name": "worker", "workingDir": "/tmp"}]},
        spec={"failurePolicy": {"backoffLimit": 0}, "workers": {"replicas": 3}},
    )
    job = manifest.training_job("digits", "digits-code", options)
    spec = job["spec"]
    assert {key: spec["workers"][key] for key in ("replicas", "minReplicas", "maxReplicas")} == {
        "replicas": 3,
        "minReplicas": 2,
        "maxReplicas": 8,
    }
    assert spec["failurePolicy"] == {"backoffLimit": 0}
    pod = spec["workers"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["nodeSelector"] == {"zone": "x"}
    assert container["workingDir"] == "/tmp"
    assert container["command"][0] == "python"
    assert container["resources"] == {
        kind: {"cpu": "2", "nvidia.com/gpu": "1"} for kind in ("requests", "limits")
    }
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "A", "value": "b"} in container["env"]
    assert pod["volumes"][0]["configMap"]["name"] == "digits-code"
    TrainingJobSpec.model_validate(spec)


def test_another_image_may_be_root_and_limits_may_differ() -> None:
    options = manifest.JobOptions(image="mine:1", resources={"requests": {"cpu": 1}})
    pod = manifest.training_job("a", "b", options)["spec"]["workers"]["template"]["spec"]
    assert "securityContext" not in pod
    assert "securityContext" not in pod["containers"][0]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 1}}
    assert manifest.sizes(4) == {"replicas": 4}


def test_what_is_not_said_is_left_to_the_template() -> None:
    plain = manifest.training_job("a", "b", manifest.JobOptions())["spec"]
    assert plain["strategy"] == {"type": "AllReduce"}
    assert plain["workers"]["template"]["spec"]["containers"][0]["image"] == manifest.IMAGE
    named = manifest.training_job("a", "b", manifest.JobOptions(template="TrainingTemplate/gpu"))["spec"]
    assert named["templateRef"] == {"kind": "TrainingTemplate", "name": "gpu"}
    assert "strategy" not in named
    [container] = named["workers"]["template"]["spec"]["containers"]
    assert not {"image", "securityContext", "resources"} & container.keys()
    assert container["name"] == "worker"
    said = manifest.JobOptions(template="gpu", image="mine:1", strategy="Hybrid", workers=2)
    both = manifest.training_job("a", "b", said)["spec"]
    assert both["templateRef"] == {"kind": "ClusterTrainingTemplate", "name": "gpu"}
    assert both["strategy"] == {"type": "Hybrid"}
    assert both["workers"]["template"]["spec"]["containers"][0]["image"] == "mine:1"


@pytest.mark.parametrize("template", ["Gpu", "Pod/gpu", "a/b/c", "TrainingTemplate/", "/gpu"])
def test_a_template_has_a_name_and_one_of_two_kinds(template: str) -> None:
    with pytest.raises(SourceError, match="names no template: give the name of a ClusterTrainingTemplate"):
        manifest.training_job("a", "b", manifest.JobOptions(template=template))


def test_standbys_are_a_number() -> None:
    options = manifest.JobOptions(workers=(1, 4), standby=1)
    workers = manifest.training_job("a", "b", options)["spec"]["workers"]
    assert {key: workers[key] for key in ("replicas", "standby")} == {"replicas": 4, "standby": 1}
    assert "standby" not in manifest.training_job("a", "b", manifest.JobOptions())["spec"]["workers"]
    zero = manifest.training_job("a", "b", manifest.JobOptions(standby=0))["spec"]["workers"]
    assert zero["standby"] == 0  # a template may say another number
    for wrong in (-1, True, "1", 1.5):
        with pytest.raises(SourceError, match="standby is how many pods stand by"):
            manifest.training_job("a", "b", manifest.JobOptions(standby=wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, (3, 2), (1, 2, 3), True, 1.5, ()])
def test_workers_are_numbers_in_order(workers: Any) -> None:
    with pytest.raises(SourceError, match=r"workers is a number from 1 on, or \(the fewest, the most\)"):
        manifest.sizes(workers)


@settings(max_examples=25)
@given(st.text(max_size=60))
def test_made_names_are_names_of_jobs(base: str) -> None:
    name = manifest.job_name(base, "0123abcd")
    assert len(name) <= names.MAX_JOB_NAME
    assert name.endswith("-0123ab")
    assert name[0].isalpha()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_the_code_goes_with_the_job() -> None:
    config = manifest.config_map("digits-code", "digits", pack(train, {"lr": 1}))
    assert config["immutable"] is True
    job = {"metadata": {"name": "digits", "uid": "u1"}}
    [owner] = manifest.owned_by(job)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("TrainingJob", "u1")


def test_binary_data_is_as_the_api_wants_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    payload = pack(train, {"lr": 1}, code=tmp_path)
    assert base64.b64decode(payload.fields()["binaryData"]["code.tar.gz"]) == payload.binary["code.tar.gz"]
