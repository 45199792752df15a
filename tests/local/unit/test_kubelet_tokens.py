"""Tokens on disk: bound, renewed before they end, and replaced together with what lies beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from springtide_local.api.auth import ISSUER, Tokens
from springtide_local.api.store import Store
from springtide_local.kubelet.payload import write_payload
from springtide_local.kubelet.tokens import Issued, PodTokens
from springtide_local.ports import ApiError

Object = dict[str, Any]
POD: Object = {"metadata": {"name": "p", "namespace": "default", "uid": "u"}, "spec": {}}


class Issuer:
    """Counts what is issued; tokens live for `life` seconds."""

    def __init__(self, life: float) -> None:
        self.life = life
        self.now = 1000.0
        self.asked: list[tuple[str, int]] = []

    def __call__(self, pod: Object, audience: str, seconds: int) -> Issued:
        self.asked.append((audience, seconds))
        return Issued(f"token-{len(self.asked)}", self.now + self.life)


def test_token_is_renewed_when_a_fifth_of_its_life_is_left() -> None:
    issuer = Issuer(3600)
    tokens = PodTokens(issuer, lambda: issuer.now)
    source = {"path": "token", "expirationSeconds": 3607}
    assert tokens.renew_at is None
    assert tokens.get(POD, source) == "token-1"
    assert tokens.renew_at == 1000 + 2880
    issuer.now += 2879
    assert tokens.get(POD, source) == "token-1"
    issuer.now += 1
    assert tokens.get(POD, source) == "token-2"
    assert issuer.asked == [("", 3607)] * 2


def test_long_lived_token_is_renewed_after_a_day() -> None:
    issuer = Issuer(365 * 86400)
    tokens = PodTokens(issuer, lambda: issuer.now)
    tokens.get(POD, {"path": "a", "audience": "vault"})
    tokens.get(POD, {"path": "b"})
    assert tokens.renew_at == 1000 + 86400
    assert issuer.asked == [("vault", 3600), ("", 3600)]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith("..")}


def test_files_of_a_volume_are_replaced_at_once(tmp_path: Path) -> None:
    assert write_payload(tmp_path, {"token": (b"one", 0o600), "ca.crt": (b"ca", 0o644)})
    first = (tmp_path / "..data").resolve()
    assert contents(tmp_path) == {"token": "one", "ca.crt": "ca"}
    assert (tmp_path / "token").is_symlink()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert not write_payload(tmp_path, {"token": (b"one", 0o600), "ca.crt": (b"ca", 0o644)})
    assert (tmp_path / "..data").resolve() == first
    assert write_payload(tmp_path, {"token": (b"two", 0o600), "deep/er": (b"x", 0o400)})
    assert (tmp_path / "token").read_text() == "two"
    assert (tmp_path / "deep/er").read_text() == "x"
    assert not (tmp_path / "ca.crt").exists()
    assert not first.exists()
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("..")]) == 2


def store_with_pod() -> tuple[Store, Object]:
    store = Store()
    spec = {"containers": [{"name": "c", "image": "x"}]}
    return store, store.create("pods", {"metadata": {"name": "p"}, "spec": spec}, "default")


def test_token_is_bound_to_its_pod_its_audience_and_its_time() -> None:
    store, pod = store_with_pod()
    tokens = Tokens(store, longest=30.0)
    token, expires = tokens.issue("default", "default", 3600, (ISSUER,), pod)
    assert 28 <= expires - store.now() <= 30
    user = tokens.check(token)
    assert user is not None
    assert user.name == "system:serviceaccount:default:default"
    other, _ = tokens.issue("default", "default", 3600, ("vault",), pod)
    assert tokens.check(other) is None
    assert tokens.check(other, ("vault",)) is not None
    store.delete("pods", "p", "default", grace_period_seconds=0)
    assert tokens.check(token) is None
    assert tokens.check("\udcff.\udcff.\udcff") is None


@pytest.mark.parametrize(
    ("pod", "account", "mounted"),
    [
        (None, None, True),
        (False, None, False),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_pod_decides_on_its_token_before_its_account(
    pod: bool | None, account: bool | None, mounted: bool
) -> None:
    store = Store()
    robot: Object = {"metadata": {"name": "robot"}}
    if account is not None:
        robot["automountServiceAccountToken"] = account
    store.create("serviceaccounts", robot, "default")
    container = {"name": "c", "image": "x"}
    spec: Object = {"serviceAccountName": "robot", "containers": [container], "initContainers": [container]}
    spec["initContainers"] = [{"name": "i", "image": "x"}]
    if pod is not None:
        spec["automountServiceAccountToken"] = pod
    made = store.create("pods", {"metadata": {"name": "p"}, "spec": spec}, "default")["spec"]
    paths = [
        mount["mountPath"]
        for one in (*made["containers"], *made["initContainers"])
        for mount in one.get("volumeMounts", ())
    ]
    assert paths == ["/var/run/secrets/kubernetes.io/serviceaccount"] * (2 if mounted else 0)
    assert len(made.get("volumes", ())) == int(mounted)


def test_a_mount_of_ones_own_is_left_alone() -> None:
    store = Store()
    place = "/var/run/secrets/kubernetes.io/serviceaccount"
    mount = {"name": "mine", "mountPath": place}
    container = {"name": "c", "image": "x", "volumeMounts": [mount]}
    spec = {"containers": [container], "volumes": [{"name": "mine", "emptyDir": {}}]}
    made = store.create("pods", {"metadata": {"name": "p"}, "spec": spec}, "default")["spec"]
    assert [volume["name"] for volume in made["volumes"]] == ["mine"]
    assert made["containers"][0]["volumeMounts"] == [mount]


def test_namespace_lacks_nothing_and_missing_account_is_named() -> None:
    store = Store()
    store.authority = "PEM"
    store.create("namespaces", {"metadata": {"name": "n"}})
    assert store.get("configmaps", "kube-root-ca.crt", "n")["data"] == {"ca.crt": "PEM"}
    spec = {"containers": [{"name": "c", "image": "x"}]}
    store.delete("serviceaccounts", "default", "n")
    with pytest.raises(ApiError, match='looking up service account n/default: serviceaccount "default"'):
        store.create("pods", {"metadata": {"name": "p"}, "spec": spec}, "n")
