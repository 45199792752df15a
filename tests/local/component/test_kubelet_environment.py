"""Surroundings of a container: environment, volumes, paths, its API token. Runs against any cluster but where
said.
"""

from __future__ import annotations

import base64
import json

import pytest
from local_cluster import EXTERNAL, FIXTURES, IMAGE, Kube, state_of, until

from springtide_kube.errors import ApiRefusal

cluster, kube, target_kubeconfig = FIXTURES

embedded = pytest.mark.skipif(bool(EXTERNAL), reason="tells how the embedded kubelet does it")


def _env(kube: Kube, name: str, **container: object) -> dict[str, str]:
    """Run a container that prints its environment as JSON."""
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    kube.pod(name, ["python", "-c", script], **container)
    kube.wait_phase(name, "Succeeded")
    found: dict[str, str] = json.loads(kube.logs(name))
    return found


def test_the_downward_api_tells_the_pod_about_itself(kube: Kube) -> None:
    paths = {
        "NAME": "metadata.name",
        "SPACE": "metadata.namespace",
        "UID_": "metadata.uid",
        "NODE": "spec.nodeName",
        "IP": "status.podIP",
        "HOST": "status.hostIP",
        "LABEL": "metadata.labels['tide']",
    }
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]
    env.append(
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}}
    )
    env.append(
        {
            "name": "MEMORY",
            "valueFrom": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}},
        }
    )
    env.append({"name": "ALL", "value": "$(SPACE)/$(NAME) $(MISSING) $$(NAME)"})
    limits = {"limits": {"cpu": "250m", "memory": "64Mi"}}
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    kube.pod("about", ["python", "-c", script], env=env, resources=limits, spec={"labels": {"tide": "high"}})
    pod = kube.wait_phase("about", "Succeeded")
    found = json.loads(kube.logs("about"))
    assert (found["NAME"], found["SPACE"], found["UID_"]) == ("about", kube.namespace, pod["metadata"]["uid"])
    assert (found["IP"], found["HOST"]) == (pod["status"]["podIP"], pod["status"]["hostIP"])
    assert (found["NODE"], found["LABEL"]) == (pod["spec"]["nodeName"], "high")
    assert (found["CPU"], found["MEMORY"]) == ("250", "64")
    assert found["ALL"] == f"{kube.namespace}/about $(MISSING) $(NAME)"


def test_config_maps_and_secrets_become_variables(kube: Kube) -> None:
    kube.create("configmaps", {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"A": "1", "B": "2"}})
    secret = {
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"token": base64.b64encode(b"hush").decode()},
    }
    kube.create("secrets", secret)
    env = [
        {"name": "B", "value": "own"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "ONE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "A"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "absent", "key": "A", "optional": True}}},
    ]
    found = _env(kube, "vars", env=env, envFrom=[{"configMapRef": {"name": "c"}, "prefix": ""}])
    assert (found["A"], found["B"], found["TOKEN"], found["ONE"]) == ("1", "own", "hush", "1")
    assert "NONE" not in found


def test_missing_secret_is_named_and_container_starts_once_there(kube: Kube) -> None:
    env = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "later", "key": "token"}}}]
    kube.pod("waits", ["sh", "-c", "echo $TOKEN"], env=env)
    pod = kube.wait_pod(
        "waits",
        lambda p: state_of(p).get("waiting", {}).get("reason") == "CreateContainerConfigError",
        "the reason",
    )
    assert state_of(pod)["waiting"]["message"] == 'secret "later" not found'
    assert pod["status"]["phase"] == "Pending"
    kube.create("secrets", {"kind": "Secret", "metadata": {"name": "later"}, "stringData": {"other": "x"}})
    kube.wait_pod(
        "waits",
        lambda p: "couldn't find key token" in state_of(p).get("waiting", {}).get("message", ""),
        "the key",
    )
    kube.patch("secrets", "later", {"stringData": {"token": "there"}})
    kube.wait_phase("waits", "Succeeded")
    assert kube.logs("waits").strip() == "there"


def test_volumes_show_what_they_are_made_of(kube: Kube) -> None:
    kube.create(
        "configmaps",
        {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a.txt": "alpha", "b.txt": "beta"}},
    )
    kube.create("secrets", {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "hush"}})
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    kube.create(
        "persistentvolumeclaims", {"kind": "PersistentVolumeClaim", "metadata": {"name": "p"}, "spec": claim}
    )
    sources = [
        {"configMap": {"name": "c", "items": [{"key": "b.txt", "path": "sub/renamed"}]}},
        {"secret": {"name": "s"}},
        {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    volumes = [
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s", "defaultMode": 256}},
        {"name": "mixed", "projected": {"sources": sources}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "p"}},
        {"name": "scratch", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": volume["name"], "mountPath": f"/data/{volume['name']}"} for volume in volumes]
    script = (
        "cat /data/config/a.txt; echo; cat /data/secret/key; echo; cat /data/mixed/sub/renamed; "
        "echo; cat /data/mixed/key; echo; "
        "cat /data/mixed/labels; echo; echo kept > /data/claim/file; touch /data/scratch/x && stat "
        "-L -c %a /data/secret/key"
    )
    spec = {"volumes": volumes, "labels": {"tide": "high"}}
    kube.pod("shown", ["sh", "-c", script], volumeMounts=mounts, spec=spec)
    kube.wait_phase("shown", "Succeeded")
    assert kube.logs("shown").split() == ["alpha", "hush", "beta", "hush", 'tide="high"', "400"]
    assert kube.get("persistentvolumeclaims", "p")["status"]["phase"] == "Bound"
    kube.pod("again", ["cat", "/data/claim/file"], volumeMounts=mounts, spec=spec)
    kube.wait_phase("again", "Succeeded")
    assert kube.logs("again").strip() == "kept"


def test_a_sub_path_is_one_part_of_a_volume(kube: Kube) -> None:
    volume = {"name": "v", "emptyDir": {}}
    init_mount = [{"name": "v", "mountPath": "/all"}]
    init = {
        "name": "init",
        "image": IMAGE,
        "command": ["sh", "-c", "mkdir /all/part; echo in > /all/part/file"],
    }
    kube.pod(
        "part",
        ["cat", "/only/file"],
        volumeMounts=[{"name": "v", "mountPath": "/only", "subPath": "part"}],
        spec={"volumes": [volume], "initContainers": [{**init, "volumeMounts": init_mount}]},
    )
    kube.wait_phase("part", "Succeeded")
    assert kube.logs("part", container="main").strip() == "in"


def test_unmountable_volume_is_reported_and_mounted_later(kube: Kube) -> None:
    volume = {"name": "v", "configMap": {"name": "later"}}
    kube.pod(
        "mounts", ["cat", "/v/a"], volumeMounts=[{"name": "v", "mountPath": "/v"}], spec={"volumes": [volume]}
    )
    message = 'MountVolume.SetUp failed for volume "v" : configmap "later" not found'
    until(lambda: message in kube.events("mounts", "FailedMount"), "the event", 60)
    assert state_of(kube.get("pods", "mounts"))["waiting"]["reason"] == "ContainerCreating"
    kube.create("configmaps", {"kind": "ConfigMap", "metadata": {"name": "later"}, "data": {"a": "here"}})
    kube.wait_phase("mounts", "Succeeded", 180)
    assert kube.logs("mounts") == "here"


@embedded
def test_a_changed_config_map_reaches_a_running_container(kube: Kube) -> None:
    kube.create("configmaps", {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "old"}})
    script = "until grep -q new /v/a; do sleep 0.05; done; cat /v/a"
    volume = {"name": "v", "configMap": {"name": "c"}}
    kube.pod(
        "live",
        ["sh", "-c", script],
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        spec={"volumes": [volume]},
    )
    kube.wait_phase("live", "Running")
    kube.patch("configmaps", "c", {"data": {"a": "new"}})
    kube.wait_phase("live", "Succeeded")


@embedded
def test_paths_are_rewritten_inside_variables_and_options(kube: Kube) -> None:
    env = [
        {"name": "LIST", "value": "/a:/data,/data/x"},
        {"name": "URI", "value": "file:///data/ckpt"},
        {"name": "FAR", "value": "https://host/data/x"},
    ]
    script = (
        "import os, sys; print(sys.argv[1], os.environ['LIST'], os.environ['URI'], "
        "os.environ['FAR'], os.getcwd())"
    )
    kube.pod(
        "paths",
        ["python", "-c", script, "--dir=/data/deep"],
        env=env,
        workingDir="/data",
        volumeMounts=[{"name": "v", "mountPath": "/data"}],
        spec={"volumes": [{"name": "v", "emptyDir": {}}]},
    )
    kube.wait_phase("paths", "Succeeded")
    option, many, uri, far, cwd = kube.logs("paths").split()
    assert cwd.endswith("/volumes/v")
    assert option == f"--dir={cwd}/deep"
    assert many == f"/a:{cwd},{cwd}/x"
    assert uri == f"file://{cwd}/ckpt"
    assert far == "https://host/data/x"


@embedded
def test_nothing_of_the_callers_environment_leaks(kube: Kube) -> None:
    found = _env(kube, "clean")
    ours = {name for name in found if name.startswith("SPRINGTIDE_")}
    assert ours == {
        "SPRINGTIDE_BIND",
        "SPRINGTIDE_LOCAL_CLUSTER",
        "SPRINGTIDE_LOCAL_CONTAINER",
        "SPRINGTIDE_SERVICE_ACCOUNT_DIR",
    }
    assert found["SPRINGTIDE_BIND"] == kube.get("pods", "clean")["status"]["podIP"]
    assert "PYTEST_CURRENT_TEST" not in found
    assert found["HOSTNAME"] == "clean"


def test_services_are_announced(kube: Kube) -> None:
    service = {"ports": [{"name": "rpc", "port": 7070}], "selector": {"app": "x"}}
    kube.create("services", {"kind": "Service", "metadata": {"name": "the-job"}, "spec": service})
    address = kube.get("services", "the-job")["spec"]["clusterIP"]
    until(lambda: kube.list("services"), "the service")
    found = _env(kube, "linked")
    assert (found["THE_JOB_SERVICE_HOST"], found["THE_JOB_SERVICE_PORT"]) == (address, "7070")
    assert found["THE_JOB_SERVICE_PORT_RPC"] == "7070"
    assert found["THE_JOB_PORT_7070_TCP"] == f"tcp://{address}:7070"


def test_every_pod_is_told_where_the_api_server_is(kube: Kube) -> None:
    found = _env(kube, "told")
    host, port = found["KUBERNETES_SERVICE_HOST"], found["KUBERNETES_SERVICE_PORT"]
    assert found["KUBERNETES_SERVICE_PORT_HTTPS"] == port
    assert found["KUBERNETES_PORT"] == found[f"KUBERNETES_PORT_{port}_TCP"] == f"tcp://{host}:{port}"
    assert found[f"KUBERNETES_PORT_{port}_TCP_ADDR"] == host
    assert "KUBECONFIG" not in found


def test_a_pod_speaks_to_the_api_as_its_service_account(kube: Kube) -> None:
    script = """
import json, os, ssl, sys, urllib.request
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
token = open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
print(open("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read())
context = ssl.create_default_context(cafile="/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
body = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).encode()
headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
request = urllib.request.Request(server + "/apis/authentication.k8s.io/v1/selfsubjectreviews", body, headers)
print(json.load(urllib.request.urlopen(request, context=context))["status"]["userInfo"]["username"])
"""
    kube.create("serviceaccounts", {"kind": "ServiceAccount", "metadata": {"name": "robot"}})
    kube.pod("speaker", ["python", "-c", script], spec={"serviceAccountName": "robot"})
    kube.wait_phase("speaker", "Succeeded")
    assert kube.logs("speaker").split() == [kube.namespace, f"system:serviceaccount:{kube.namespace}:robot"]
    (volume,) = kube.get("pods", "speaker")["spec"]["volumes"]
    assert volume["name"].startswith("kube-api-access-")
    assert [*volume["projected"]["sources"][0]] == ["serviceAccountToken"]


def test_a_template_may_say_itself_where_its_token_lies(kube: Kube) -> None:
    token = {"path": "vault/token", "expirationSeconds": 1200, "audience": "vault"}
    volume = {"name": "v", "projected": {"sources": [{"serviceAccountToken": token}]}}
    script = (
        "import base64, json; part = open('/tokens/vault/token').read().split('.')[1]; "
        "claims = json.loads(base64.urlsafe_b64decode(part + '=' * (-len(part) % 4))); "
        "print(claims['aud'][0], claims['exp'] - claims['iat'], claims['kubernetes.io']['pod']['uid'])"
    )
    mounts = [{"name": "v", "mountPath": "/tokens"}]
    kube.pod("own", ["python", "-c", script], volumeMounts=mounts, spec={"volumes": [volume]})
    pod = kube.wait_phase("own", "Succeeded")
    assert kube.logs("own").split() == ["vault", "1200", pod["metadata"]["uid"]]
    token["expirationSeconds"] = 30
    with pytest.raises(match="may not specify a duration less than 10 minutes"):
        kube.pod("short", ["true"], spec={"volumes": [volume]})


def test_a_pod_of_an_unknown_account_is_refused(kube: Kube) -> None:
    text = f'pods "p" is forbidden: error looking up service account {kube.namespace}/nobody: '
    with pytest.raises(ApiRefusal) as refused:
        kube.pod("p", ["true"], spec={"serviceAccountName": "nobody"})
    assert (refused.value.code, refused.value.message) == (
        403,
        f'{text}serviceaccount "nobody" not found',
    )


@embedded
def test_a_pod_that_wants_no_token_gets_none(kube: Kube) -> None:
    script = (
        "import os; print('SPRINGTIDE_SERVICE_ACCOUNT_DIR' in os.environ, "
        "os.path.exists('/var/run/secrets/kubernetes.io/serviceaccount/token'))"
    )
    kube.pod("silent", ["python", "-c", script], spec={"automountServiceAccountToken": False})
    kube.create(
        "serviceaccounts",
        {"kind": "ServiceAccount", "metadata": {"name": "mute"}, "automountServiceAccountToken": False},
    )
    kube.pod("mute", ["python", "-c", script], spec={"serviceAccountName": "mute"})
    for name in ("silent", "mute"):
        kube.wait_phase(name, "Succeeded")
        assert kube.logs(name).split() == ["False", "False"]
