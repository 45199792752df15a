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
from springtide_operator.api.job import Job, JobKey
from springtide_operator.certificate import job_authority, job_certificate
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.manifests.coordinator import coordinator_pod, secret
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_protocol.tls import read_authority, read_certificate
from springtide_protocol.tls_names import SERVER_NAME, server_name

ROOT_KEY = b"r" * 32


def secure_job() -> Job:
    obj = job_object(1)
    obj["spec"]["security"] = {"tls": True}
    obj["status"] = {"keys": [{"id": "abcdef", "certificateEnds": "2030-01-01T00:00:00Z"}]}
    return Job.parse(obj)


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}


ENDS, DAYS = 2_000_000_000, 86_400.0


def test_every_operator_with_the_root_key_makes_the_same_bytes() -> None:
    first = job_certificate(ROOT_KEY, "uid-1", ENDS, 90 * DAYS)
    job_certificate.cache_clear()
    assert job_certificate(ROOT_KEY, "uid-1", ENDS, 90 * DAYS) == first
    others = [
        job_certificate(ROOT_KEY, "uid-2", ENDS, 90 * DAYS),
        job_certificate(b"s" * 32, "uid-1", ENDS, 90 * DAYS),
        job_certificate(ROOT_KEY, "uid-1", ENDS, 90 * DAYS, "again"),
        job_certificate(ROOT_KEY, "uid-1", ENDS + 1, 90 * DAYS),
    ]
    assert len({first, *others}) == 5
    assert job_authority(ROOT_KEY, "uid-1") != job_authority(ROOT_KEY, "uid-1", "again")


def test_certificate_is_signed_by_its_authority_and_ends() -> None:
    text, key_text = job_certificate(ROOT_KEY, "uid-1", ENDS, 90 * DAYS)
    authority_text = job_authority(ROOT_KEY, "uid-1")
    authority = x509.load_pem_x509_certificate(authority_text.encode())
    certificate = x509.load_pem_x509_certificate(text.encode())
    key = serialization.load_pem_private_key(key_text.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == certificate.public_key()
    certificate.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [server_name(authority_text), SERVER_NAME]
    assert certificate.not_valid_after_utc.timestamp() == ENDS
    assert 90 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 100
    assert authority.not_valid_after_utc.year == 9999
    usage = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not usage.ca, "whoever has a coordinator's key can sign nothing"


def test_only_a_job_asking_for_tls_has_it_in_secret_and_pods() -> None:
    plain, secured = Job.parse(job_object(1)), secure_job()
    credentials = JobCredentials(ROOT_KEY, plain.uid)
    key = JobKey(credentials.key, ENDS)
    assert set(credentials.secret_data(JobKey(credentials.key), False, DAYS)) == {"token"}
    data = secret(secured, credentials.secret_data(key, True, DAYS))["data"]
    certificate, private = job_certificate(ROOT_KEY, plain.uid, ENDS, DAYS)
    assert {key: base64.b64decode(value).decode() for key, value in data.items()} == {
        "token": credentials.token,
        "ca.crt": job_authority(ROOT_KEY, plain.uid),
        "tls.crt": certificate,
        "tls.key": private,
    }
    worker, coordinator = variables(worker_pod(secured, 0, 0, "h:1")), variables(coordinator_pod(secured, 1))
    assert worker["SPRINGTIDE_TLS_CA"]["valueFrom"]["secretKeyRef"]["key"] == "ca.crt"
    assert coordinator["SPRINGTIDE_TLS_KEY"]["valueFrom"]["secretKeyRef"]["key"] == "tls.key"
    assert "SPRINGTIDE_TLS_KEY" not in worker  # workers prove nothing with it
    secured = replace(secured, spec=secured.spec.model_copy(update={"parameter_servers": None}))
    assert "SPRINGTIDE_TLS_CA" in variables(server_pod(secured, 0, 0, "h:1"))
    for pod in (worker_pod(plain, 0, 0, "h:1"), coordinator_pod(plain, 1)):
        assert not any("TLS" in name for name in variables(pod))


@pytest.mark.slow
@pytest.mark.parametrize("old", [{}, {"tls": True}, {"tls": False}])
@pytest.mark.parametrize("new", [{}, {"tls": True}, {"tls": False}])
def test_it_cannot_be_turned_on_or_off_later(old: dict[str, Any], new: dict[str, Any]) -> None:
    top = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    node = schema.compile_schema(top["properties"]["spec"])
    before, after = (
        {"workers": {"template": {"spec": {"containers": []}}}, "security": given} for given in (old, new)
    )
    found: list[FieldError] = []
    for given in (before, after):
        schema.apply_defaults(node, given)
    validate_rules(node, after, before, "spec", found)
    assert [str(error) for error in found if "security.tls is immutable" in str(error)] == [
        str(error) for error in found
    ]
    assert len(found) == (old != new)


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
    authority = base64.b64decode(made()[0]["data"]["ca.crt"]).decode()
    assert authority == job_authority(root_key, uid)
