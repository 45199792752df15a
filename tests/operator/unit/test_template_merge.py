"""The merge of a job into its template: its own fields win, and the others come from there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_operator.api.template_merge import main_container, merge

Object = dict[str, Any]


def pod(**spec: Any) -> Object:
    return {"workers": {"template": {"spec": spec}}}


def merged_pod(template: Object, own: Object) -> Object:
    found: Object = merge(pod(**template), pod(**own))["workers"]["template"]["spec"]
    return found


def container(template: Object, own: Object) -> Object:
    """Return the one container of a job whose template has the one, and which itself has the other."""
    [found] = merged_pod({"containers": [template]}, {"containers": [own]})["containers"]
    assert isinstance(found, dict)
    return found


def test_fields_of_both_are_there_and_the_jobs_win() -> None:
    template = {"strategy": {"type": "Hybrid", "allReduce": {"bucketMiB": 5}}, "podCleanup": "All"}
    own = {"strategy": {"allReduce": {"bucketMiB": 9}}, "failurePolicy": {"backoffLimit": 0}}
    assert merge(template, own) == {
        "strategy": {"type": "Hybrid", "allReduce": {"bucketMiB": 9}},
        "podCleanup": "All",
        "failurePolicy": {"backoffLimit": 0},
    }


@pytest.mark.parametrize("value", [0, False, "", [], "None"])
def test_a_value_that_looks_empty_wins(value: Any) -> None:
    assert merge({"a": {"b": 7}}, {"a": {"b": value}}) == {"a": {"b": value}}


def test_a_null_says_nothing() -> None:
    assert container({"image": "a", "tty": True}, {"image": None, "tty": None, "stdin": None}) == {
        "name": "worker",
        "image": "a",
        "tty": True,
    }


def test_containers_merge_by_name_and_keep_their_order() -> None:
    template = [{"name": "worker", "image": "a"}, {"name": "logs", "image": "b"}]
    own = [{"name": "logs", "args": ["-v"]}, {"name": "new", "image": "c"}, {"name": "worker", "tty": True}]
    assert merged_pod({"containers": template}, {"containers": own})["containers"] == [
        {"name": "worker", "image": "a", "tty": True},
        {"name": "logs", "image": "b", "args": ["-v"]},
        {"name": "new", "image": "c"},
    ]


@pytest.mark.parametrize(
    ("template", "own", "main"),
    [
        ([{"image": "a"}], [{"tty": True}], "worker"),
        ([{"image": "a"}], [{"name": "worker", "tty": True}], "worker"),
        ([{"name": "trainer", "image": "a"}], [{"tty": True}], "trainer"),
    ],
)
def test_an_unnamed_container_is_the_main_one(template: list[Any], own: list[Any], main: str) -> None:
    [found] = merged_pod({"containers": template}, {"containers": own})["containers"]
    assert found == {"name": main, "image": "a", "tty": True}


def test_variables_are_replaced_whole_in_place() -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    template = [{"name": "A", "valueFrom": secret}, {"name": "B", "value": "1"}]
    own = [{"name": "C", "value": "$(A)"}, {"name": "A", "value": "x"}]
    assert container({"env": template}, {"env": own})["env"] == [
        {"name": "A", "value": "x"},  # and no valueFrom, which the API server would refuse beside it
        {"name": "B", "value": "1"},
        {"name": "C", "value": "$(A)"},
    ]


def test_volumes_keep_one_source() -> None:
    template = [{"name": "data", "emptyDir": {}}, {"name": "home", "hostPath": {"path": "/h"}}]
    own = [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]
    assert merged_pod({"volumes": template}, {"volumes": own})["volumes"] == [own[0], template[1]]


def test_mounts_ports_and_probes() -> None:
    made = container(
        {
            "volumeMounts": [{"name": "data", "mountPath": "/d", "readOnly": True}],
            "ports": [{"containerPort": 80, "name": "a"}, {"containerPort": 80, "protocol": "UDP"}],
            "startupProbe": {"exec": {"command": ["x"]}, "periodSeconds": 5},
        },
        {
            "volumeMounts": [{"name": "mine", "mountPath": "/d"}, {"name": "mine", "mountPath": "/e"}],
            "ports": [{"containerPort": 80, "protocol": "TCP", "name": "b"}],
            "startupProbe": {"tcpSocket": {"port": 1}},
        },
    )
    assert made["volumeMounts"] == [
        {"name": "mine", "mountPath": "/d", "readOnly": True},
        {"name": "mine", "mountPath": "/e"},
    ]
    assert made["ports"] == [
        {"containerPort": 80, "protocol": "TCP", "name": "b"},
        {"containerPort": 80, "protocol": "UDP"},
    ]
    assert made["startupProbe"] == {"tcpSocket": {"port": 1}}  # one handler, not two


def test_other_lists_are_the_jobs() -> None:
    spec = {"tolerations": [{"key": "a"}], "containers": [{"command": ["a", "b"], "args": ["c"]}]}
    own = {"tolerations": [{"key": "b"}], "containers": [{"command": ["x"]}]}
    made = merged_pod(spec, own)
    assert made["tolerations"] == [{"key": "b"}]
    assert made["containers"] == [{"name": "worker", "command": ["x"], "args": ["c"]}]
    rules = {"failurePolicy": {"rules": [{"name": "a", "action": "Ignore"}]}}
    assert merge(rules, {"failurePolicy": {"rules": []}}) == {"failurePolicy": {"rules": []}}
    # Outside of a pod `env` and `ports` are names like any other.
    assert merge({"env": [{"name": "a"}]}, {"env": [{"name": "b"}]}) == {"env": [{"name": "b"}]}


def test_resources_merge_by_name() -> None:
    made = container(
        {"resources": {"limits": {"cpu": 1, "nvidia.com/gpu": 1}}},
        {"resources": {"limits": {"cpu": 2}, "requests": {"cpu": 2}}},
    )
    assert made["resources"] == {"limits": {"cpu": 2, "nvidia.com/gpu": 1}, "requests": {"cpu": 2}}


def test_the_main_container_of_each_role() -> None:
    assert main_container({}, "workers") == ""
    assert main_container(pod(containers=[{"image": "a"}]), "workers") == "worker"
    assert main_container(pod(containers=[{"name": "a"}, {"name": "worker"}]), "workers") == "worker"
    assert main_container(pod(containers=[{"name": "a"}, {"name": "b"}]), "workers") == "a"
    servers = {"parameterServers": {"template": {"spec": {"containers": [{"image": "a"}]}}}}
    assert main_container(servers, "parameterServers") == "server"


_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["", "a", "b"]))
_NAMES = st.sampled_from(["worker", "a", "b"])
_ENV = st.lists(
    st.one_of(
        st.fixed_dictionaries({"name": _NAMES, "value": st.sampled_from(["1", "2"])}),
        st.fixed_dictionaries({"name": _NAMES, "valueFrom": st.just({"fieldRef": {"fieldPath": "x"}})}),
    ),
    max_size=3,
    unique_by=lambda one: one["name"],
)
_CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": _NAMES},
        optional={
            "image": st.sampled_from(["x", "y"]),
            "env": _ENV,
            "args": st.lists(st.sampled_from("abc"), max_size=3),
            "resources": st.dictionaries(
                st.sampled_from(["limits", "requests"]), st.dictionaries(st.sampled_from(["cpu"]), _SCALARS)
            ),
        },
    ),
    max_size=3,
    unique_by=lambda one: one["name"],
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.dictionaries(
            st.sampled_from(["type", "allReduce", "x"]),
            st.one_of(_SCALARS, st.dictionaries(st.sampled_from("ab"), _SCALARS)),
        ),
        "workers": st.fixed_dictionaries(
            {},
            optional={
                "maxReplicas": st.integers(1, 9),
                "template": st.fixed_dictionaries(
                    {},
                    optional={
                        "spec": st.fixed_dictionaries(
                            {}, optional={"containers": _CONTAINERS, "nodeSelector": st.just({"a": "b"})}
                        )
                    },
                ),
            },
        ),
    },
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of an object by path; items of lists with a name go by that, others are leaves."""
    if isinstance(value, dict) and value:
        return {
            key: one for name, inner in value.items() for key, one in leaves(inner, (*path, name)).items()
        }
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        if path[-1] == "env":
            return {(*path, one["name"]): one for one in value}
        return {key: one for item in value for key, one in leaves(item, (*path, item["name"])).items()}
    return {path: value}


@settings(max_examples=150)
@given(SPECS, SPECS)
def test_the_job_wins_and_nothing_of_the_template_is_lost(template: Object, own: Object) -> None:
    before = copy.deepcopy((template, own))
    made = merge(template, own)
    assert (template, own) == before
    found, ours = leaves(made), leaves(own)
    for path, value in ours.items():
        if value not in (None, {}, []):
            assert found[path] == value, path
    for path, value in leaves(template).items():
        if value in (None, {}, []):
            continue
        # Unless the job says the same field, or that something above it is no object.
        said = any(path[: len(other)] == other or other[: len(path)] == path for other in ours)
        assert said or found[path] == value, path


@settings(max_examples=150)
@given(SPECS, SPECS)
def test_merging_twice_is_merging_once(template: Object, own: Object) -> None:
    made = merge(template, own)
    assert merge(template, made) == made
    assert merge(made, own) == made
    assert merge({}, made) == made
