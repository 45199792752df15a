"""A job's certificate: the same bytes from the same root key, and of no use to another job."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from operator_cluster import FakeCluster
from operator_running import operator, until
from operator_world import job_object

from springtide_local.api import schema
from springtide_local.api.cel.evaluation import validate_rules
from springtide_local.api.errors import FieldError
from springtide_operator.api.crd import custom_resource_definition
from springtide_operator.api.job import Job
from springtide_operator.certificate import job_certificate
from springtide_operator.manifests.coordinator import coordinator_pod, secret
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_protocol.tls import SERVER_NAME, read_authority, read_certificate

ROOT_KEY = b"r" * 32


def secure_job() -> Job:
    obj = job_object(1)
    obj["spec"]["security"] = {"tls": True}
    return Job.parse(obj)


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}


def test_every_operator_with_the_root_key_makes_the_same_bytes() -> None:
    first = job_certificate(ROOT_KEY, "uid-1")
    job_certificate.cache_clear()
    assert job_certificate(ROOT_KEY, "uid-1") == first
    assert len({first, job_certificate(ROOT_KEY, "uid-2"), job_certificate(b"s" * 32, "uid-1")}) == 3


def test_certificate_is_of_its_key_for_one_name_without_end() -> None:
    text, key_text = job_certificate(ROOT_KEY, "uid-1")
    certificate = x509.load_pem_x509_certificate(text.encode())
    key = serialization.load_pem_private_key(key_text.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == certificate.public_key()
    certificate.verify_directly_issued_by(certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    assert certificate.not_valid_after_utc.year == 9999


def test_only_a_job_asking_for_tls_has_it_in_secret_and_pods() -> None:
    plain, secured = Job.parse(job_object(1)), secure_job()
    assert set(secret(plain, "t")["data"]) == {"token"}
    data = secret(secured, "t", ("CERT", "KEY"))["data"]
    assert {key: base64.b64decode(value) for key, value in data.items()} == {
        "token": b"t",
        "tls.crt": b"CERT",
        "tls.key": b"KEY",
    }
    worker, coordinator = variables(worker_pod(secured, 0, 0, "h:1")), variables(coordinator_pod(secured, 1))
    assert worker["SPRINGTIDE_TLS_CA"]["valueFrom"]["secretKeyRef"]["key"] == "tls.crt"
    assert coordinator["SPRINGTIDE_TLS_KEY"]["valueFrom"]["secretKeyRef"]["key"] == "tls.key"
    assert "SPRINGTIDE_TLS_KEY" not in worker  # workers prove nothing with it
    secured = replace(secured, spec=secured.spec.model_copy(update={"parameter_servers": None}))
    assert "SPRINGTIDE_TLS_CA" in variables(server_pod(secured, 0, 0, "h:1"))
    for pod in (worker_pod(plain, 0, 0, "h:1"), coordinator_pod(plain, 1)):
        assert not any("TLS" in name for name in variables(pod))


@pytest.mark.parametrize("old", [{}, {"tls": True}, {"tls": False}])
@pytest.mark.parametrize("new", [{}, {"tls": True}, {"tls": False}])
def test_it_cannot_be_turned_on_or_off_later(old: dict[str, Any], new: dict[str, Any]) -> None:
    top = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    raw = top["properties"]["spec"]["properties"]["security"]
    found: list[FieldError] = []
    validate_rules(schema.compile_schema(raw), new, old, "spec.security", found)
    assert ["security.tls is immutable" in str(error) for error in found] == [True] * (old != new)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"SPRINGTIDE_TLS_KEY": "-----BEGIN X"}, "set both or none"),
        ({"SPRINGTIDE_TLS_CERTIFICATE": "/a/path", "SPRINGTIDE_TLS_KEY": "-----BEGIN X"}, "PEM text"),
    ],
)
def test_half_an_environment_is_refused_by_name(env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_certificate(env)
    assert read_certificate({}) is None
    assert read_authority({}) == ""
    with pytest.raises(ValueError, match="SPRINGTIDE_TLS_CA"):
        read_authority({"SPRINGTIDE_TLS_CA": "nonsense"})


async def test_operator_makes_secret_of_a_tls_job_with_certificate() -> None:
    cluster = FakeCluster()
    job = cluster.add_job(replicas=1)
    job["spec"]["security"] = {"tls": True}
    cluster.put("trainingjobs", job)

    def made() -> list[dict[str, Any]]:
        return [
            o for (plural, _, name), o in cluster.objects.items() if plural == "secrets" and "token" in name
        ]

    async with operator(cluster) as running:
        await until(made, "the job's Secret")
        uid = cluster.job()["metadata"]["uid"]
        root_key = running.settings.root_key
    assert root_key is not None
    certificate = base64.b64decode(made()[0]["data"]["tls.crt"]).decode()
    assert certificate == job_certificate(root_key, uid)[0]
