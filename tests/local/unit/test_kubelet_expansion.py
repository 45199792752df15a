"""Variables: expansion, the downward API, references, Services; and the quantities that stand in them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.kubelet.environment import (
    ConfigError,
    declared_environment,
    expand,
    field_value,
    resource_value,
    service_environment,
)
from springtide_local.kubelet.launch import command_line
from springtide_local.quantities import format_units, parse_quantity, pod_requests, units

POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u",
        "labels": {"b": "2", "a": 'q"1'},
        "annotations": {"x/y": "note"},
    },
    "spec": {"nodeName": "n", "containers": []},
    "status": {"podIP": "127.9.16.1", "hostIP": "127.9.1.1"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)z", "x1y2z"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$()", "$()"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_a_dollar_is_not_touched(text: str) -> None:
    assert expand(text, {"A": "1"}) == text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "p"),
        ("metadata.labels['b']", "2"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['x/y']", "note"),
        ("metadata.labels", 'a="q\\"1"\nb="2"'),
        ("spec.serviceAccountName", "default"),
        ("status.hostIP", "127.9.1.1"),
    ],
)
def test_fields_of_the_downward_api(path: str, expected: str) -> None:
    assert field_value(POD, path) == expected


def test_a_field_that_pods_do_not_offer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unsupported fieldPath: spec\.containers"):
        field_value(POD, "spec.containers")


@pytest.mark.parametrize(
    ("resource", "divisor", "expected"),
    [
        ("limits.cpu", "0", "2"),
        ("limits.cpu", "1m", "1500"),
        ("limits.memory", "1Mi", "64"),
        ("requests.cpu", "1m", "250"),
        ("requests.memory", "1", str(64 * 2**20)),
        ("limits.ephemeral-storage", "1Gi", "10"),
    ],
)
def test_resources_of_the_downward_api(resource: str, divisor: str, expected: str) -> None:
    container = {"resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}, "requests": {"cpu": "250m"}}}
    reference = {"resource": resource, "divisor": divisor}
    assert resource_value(reference, container, {"ephemeral-storage": "10Gi"}) == expected


def _declared(
    container: dict[str, Any], secrets: dict[str, dict[str, bytes]] | None = None
) -> dict[str, str]:
    config_maps = {"c": {"data": {"A": "config", "bad=name": "x"}}}
    return declared_environment(
        container,
        POD,
        lambda namespace, name: config_maps.get(name),
        lambda namespace, name: (secrets or {}).get(name),
        {},
        {"SVC": "10"},
    )


def test_later_sources_win_and_values_see_what_stands_before() -> None:
    container = {
        "envFrom": [
            {"configMapRef": {"name": "c"}, "prefix": "P_"},
            {"secretRef": {"name": "none", "optional": True}},
        ],
        "env": [
            {"name": "ONE", "value": "$(SVC)-$(P_A)-$(TWO)"},
            {"name": "TWO", "value": "$(ONE)"},
            {"name": "SVC", "value": "own"},
            {"name": "EMPTY"},
        ],
    }
    assert _declared(container) == {
        "SVC": "own",
        "P_A": "config",
        "ONE": "10-config-$(TWO)",
        "TWO": "10-config-$(TWO)",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "s", "key": "k"}}, "couldn't find key k in Secret ns/s"),
        ({"configMapKeyRef": {"name": "c", "key": "k"}}, "couldn't find key k in ConfigMap ns/c"),
        ({"configMapKeyRef": {"name": "none", "key": "k"}}, 'configmap "none" not found'),
    ],
)
def test_what_is_missing_is_named(source: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _declared({"env": [{"name": "X", "valueFrom": source}]}, {"s": {"other": b""}})
    assert str(caught.value) == said


def test_a_missing_whole_source_is_named() -> None:
    with pytest.raises(ConfigError, match='secret "none" not found'):
        _declared({"envFrom": [{"secretRef": {"name": "none"}}]})


def test_a_command_line_is_command_then_args_expanded() -> None:
    container = {"command": ["run", "$(A)"], "args": ["--x=$(A)", "$$(A)"]}
    assert command_line(container, {"A": "1"}) == ["run", "1", "--x=1", "$(A)"]


def test_services_without_an_address_are_not_announced() -> None:
    def service(name: str, address: str) -> dict[str, Any]:
        return {
            "metadata": {"name": name},
            "spec": {"clusterIP": address, "ports": [{"port": 80, "name": "http-x"}]},
        }

    found = service_environment([service("web-a", "127.9.4.1"), service("headless", "None")])
    assert found == {
        "WEB_A_SERVICE_HOST": "127.9.4.1",
        "WEB_A_SERVICE_PORT": "80",
        "WEB_A_SERVICE_PORT_HTTP_X": "80",
        "WEB_A_PORT": "tcp://127.9.4.1:80",
        "WEB_A_PORT_80_TCP": "tcp://127.9.4.1:80",
        "WEB_A_PORT_80_TCP_PROTO": "tcp",
        "WEB_A_PORT_80_TCP_PORT": "80",
        "WEB_A_PORT_80_TCP_ADDR": "127.9.4.1",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500m", Fraction(1, 2)),
        ("2", 2),
        (1.5, Fraction(3, 2)),
        ("1Ki", 1024),
        ("1e3", 1000),
        ("2E", 2 * 10**18),
        ("-1", -1),
    ],
)
def test_quantities(text: str | float, expected: Fraction | int) -> None:
    assert parse_quantity(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1GiB", "1e", "--1", "0x10"])
def test_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        parse_quantity(text)


@given(st.integers(0, 10**15), st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]))
def test_amounts_survive_being_printed(amount: int, resource: str) -> None:
    assert units(resource, format_units(resource, amount)) == amount


def test_pod_requests_its_containers_or_largest_init_container() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "containers": [container("1"), {"resources": {"limits": {"cpu": "500m", "nvidia.com/gpu": 1}}}],
        "initContainers": [container("100m", restartPolicy="Always"), container("3")],
        "overhead": {"cpu": "10m"},
    }
    assert pod_requests({"spec": spec}) == {"cpu": 3110, "nvidia.com/gpu": 1, "pods": 1}
