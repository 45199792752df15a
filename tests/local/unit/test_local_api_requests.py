"""Requests taken apart: paths, verbs, options, shapes, protobuf bodies."""

from __future__ import annotations

import pytest

from springtide_local.api import protobuf
from springtide_local.api.kinds.registry import builtin_resources
from springtide_local.api.negotiation import negotiate
from springtide_local.api.pages import resource_version
from springtide_local.api.protobuf_types import KINDS, MESSAGES
from springtide_local.api.requests import decimal, number, parse_target, verb_of, write_options
from springtide_local.api.resources import Registry, version_priority
from springtide_local.ports import ApiError

REGISTRY = Registry(builtin_resources())
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/api/v1/pods", ("pods", None, "", "")),
        ("/api/v1/namespaces", ("namespaces", None, "", "")),
        ("/api/v1/namespaces/n", ("namespaces", None, "n", "")),
        ("/api/v1/namespaces/n/status", ("namespaces", None, "n", "status")),
        ("/api/v1/namespaces/n/finalize", ("namespaces", None, "n", "finalize")),
        ("/api/v1/namespaces/n/pods", ("pods", "n", "", "")),
        ("/api/v1/namespaces/n/pods/p", ("pods", "n", "p", "")),
        ("/api/v1/namespaces/n/pods/p/log", ("pods", "n", "p", "log")),
        ("/apis/apps/v1/namespaces/n/deployments/d/scale", ("deployments.apps", "n", "d", "scale")),
        ("/apis/apps/v1/deployments", ("deployments.apps", None, "", "")),
        ("/api/v1/nodes/x", ("nodes", None, "x", "")),
    ],
)
def test_paths(path: str, found: tuple[str, str | None, str, str]) -> None:
    target = parse_target(REGISTRY, path)
    assert target is not None
    assert (target.resource.storage, target.namespace, target.name, target.subresource) == found


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/gadgets",
        "/apis/apps/v2/deployments",
        "/api/v1/pods/p",
        "/api/v1/namespaces/n/nodes/x",
        "/api/v1/namespaces/n/pods/p/log/more",
        "/apis/apps/v1/namespaces/n",
        "/healthz",
    ],
)
def test_paths_of_nothing(path: str) -> None:
    assert parse_target(REGISTRY, path) is None


def test_verbs() -> None:
    many, one = parse_target(REGISTRY, "/api/v1/nodes"), parse_target(REGISTRY, "/api/v1/nodes/x")
    assert many is not None
    assert one is not None
    assert [verb_of("GET", many, False), verb_of("GET", many, True), verb_of("GET", one, False)] == [
        "list",
        "watch",
        "get",
    ]
    assert [verb_of("DELETE", many, False), verb_of("DELETE", one, False)] == ["deletecollection", "delete"]
    assert [verb_of("POST", many, False), verb_of("PUT", one, False), verb_of("PATCH", one, False)] == [
        "create",
        "update",
        "patch",
    ]
    for method, target in (("PUT", many), ("PATCH", many), ("BREW", one)):
        with pytest.raises(ApiError) as caught:
            verb_of(method, target, False)
        assert caught.value.code == 405


def test_write_options_and_their_refusals() -> None:
    options = write_options({"dryRun": "All", "fieldValidation": "Strict"}, "kubectl/v1.32 (linux)")
    assert (options.manager, options.dry_run, options.field_validation) == ("kubectl", True, "Strict")
    assert write_options({"fieldManager": "me"}, "x").manager == "me"
    for wrong in ({"dryRun": "Some"}, {"fieldValidation": "Maybe"}):
        with pytest.raises(ApiError, match="Unsupported value") as caught:
            write_options(wrong, "x")
        assert caught.value.code == 422


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", ""),
        ("*/*", ""),
        ("application/json", ""),
        (f"{TABLE},application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json", "Table"),
        ("application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json", ""),
        ("application/json;as=Unheard;v=v1,application/json", ""),
        ("application/vnd.kubernetes.protobuf,application/json", ""),
    ],
)
def test_the_first_shape_that_is_known_is_taken(accept: str, kind: str) -> None:
    assert negotiate(accept, ("Table",)).kind == kind


@pytest.mark.parametrize(
    "accept", ["text/html", "application/vnd.kubernetes.protobuf", "application/json;as=Unheard;v=v1"]
)
def test_clients_that_read_no_json_are_refused(accept: str) -> None:
    with pytest.raises(ApiError) as caught:
        negotiate(accept, ("Table",))
    assert caught.value.code == 406


def test_versions_are_ordered_as_in_kubernetes() -> None:
    names = ["v1alpha1", "v2beta1", "v1", "v10", "foo", "v2", "v1beta2", "v11alpha2"]
    ordered = sorted(names, key=version_priority, reverse=True)
    assert ordered == ["v10", "v2", "v1", "v2beta1", "v1beta2", "v11alpha2", "v1alpha1", "foo"]


def part(number: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2, len(data)]) + data


def envelope(api_version: str, kind: str, raw: bytes) -> bytes:
    return protobuf.MAGIC + part(1, part(1, api_version) + part(2, kind)) + part(2, raw)


def test_a_protobuf_body_is_read() -> None:
    meta = part(1, "c") + part(3, "n") + part(11, part(1, "a") + part(2, "b")) + part(8, b"")
    raw = part(1, meta) + part(2, part(1, "key") + part(2, "value")) + bytes([4 << 3, 1])
    assert protobuf.decode(envelope("v1", "ConfigMap", raw)) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c", "namespace": "n", "labels": {"a": "b"}},
        "data": {"key": "value"},
        "immutable": True,
    }


def test_numbers_bytes_and_choices_of_protobuf() -> None:
    seconds = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    options = protobuf.decode(envelope("v1", "DeleteOptions", bytes([1 << 3]) + seconds))
    assert options["gracePeriodSeconds"] == -2
    percent = part(1, bytes([1 << 3, 1]) + part(3, "50%"))
    number = part(3, bytes([1 << 3, 0, 2 << 3, 3]))
    budget = protobuf.decode(envelope("policy/v1", "PodDisruptionBudget", part(2, percent + number)))
    assert budget["spec"] == {"minAvailable": "50%", "maxUnavailable": 3}
    secret = protobuf.decode(envelope("v1", "Secret", part(2, part(1, "k") + part(2, b"\x00\xff"))))
    assert secret["data"] == {"k": "AP8="}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", 400),
        (envelope("v1", "Gadget", b""), 415),
        (envelope("v1", "ConfigMap", part(15, "x")), 415),
        (envelope("v1", "ConfigMap", part(1, "abc"))[:-1], 400),
        (envelope("v1", "ConfigMap", b"\xff" * 11), 400),
    ],
)
def test_other_bodies_are_refused(body: bytes, code: int) -> None:
    with pytest.raises(ApiError) as caught:
        protobuf.decode(body)
    assert caught.value.code == code


def test_the_tables_of_protobuf_are_closed() -> None:
    plain = {"string", "bytes", "bool", "int", "Time", "Quantity", "IntOrString"}
    assert set(KINDS.values()) <= set(MESSAGES)
    for name, fields in MESSAGES.items():
        for field, kind in fields.values():
            base = kind.removeprefix("[]").removeprefix("map:")
            assert base in plain or base in MESSAGES, f"{name}.{field}"


@pytest.mark.parametrize("text", ["x", "²", "٣", "1_0", " 1", "9" * 4400, "1e3", "nan", "+", "-" + "9" * 40])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="ParseInt") as refused:
        number({"limit": text}, "limit")
    with pytest.raises(ApiError, match="ParseUint") as version:
        resource_version(text)
    assert (refused.value.code, version.value.code) == (400, 400)


def test_numbers_of_64_bits_are_read() -> None:
    assert number({"limit": str(-(2**63))}, "limit") == -(2**63)
    assert number({"limit": "+0012"}, "limit") == 12
    assert number({}, "limit") is None
    assert resource_version(str(2**64 - 1)) == 2**64 - 1
    assert resource_version("") == 0
    assert decimal("0" * 5000 + "7") == 7
    with pytest.raises(ApiError, match="out of range"):
        resource_version(str(2**64))
    with pytest.raises(ApiError, match="invalid syntax"):
        resource_version("-1")


def test_a_manager_is_printable_and_short() -> None:
    assert write_options({}, "kubectl/1.30").manager == "kubectl"
    assert write_options({}, "\udcff\ta b/1").manager == "a b"
    assert write_options({}, "é" * 100).manager == "é" * 64
    assert write_options({}, "\udcff/1").manager == "unknown"
    assert write_options({"fieldManager": "é" * 64}, "x").manager == "é" * 64
    for manager, text in (
        ("é" * 65, "may not be more than 128 bytes"),
        ("a\ud800", "at position 1"),
        ("\n", "000A"),
    ):
        with pytest.raises(ApiError, match=text) as refused:
            write_options({"fieldManager": manager}, "x")
        assert refused.value.code == 422
