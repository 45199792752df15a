"""The real kubectl on objects: apply, get, patch, scale, wait, delete, explain. Runs on any cluster."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from typing import Any

import pytest
import yaml
from local_api import Api

pytest_plugins = ["local_api_fixtures"]


def widget(name: str = "a", **spec: Any) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "widgets.test.springtide.dev/v1",
            "kind": "Widget",
            "metadata": {"name": name},
            "spec": {"color": "red", "size": 2, "parts": [{"name": "x", "weight": 1}], **spec},
        }
    )


DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  replicas: 0
  selector: {matchLabels: {app: d}}
  template:
    metadata: {labels: {app: d}}
    spec:
      containers:
      - name: c
        image: one
        env: [{name: A, value: "1"}, {name: B, value: "1"}]
        ports: [{containerPort: 80}]
      - {name: e, image: two}
      volumes: [{name: v, emptyDir: {}}]
"""


class Lines:
    """The lines of a running process, each waited for with a deadline."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._queue: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._queue.put(line.rstrip("\n"))

    def next(self, what: str) -> str:
        try:
            return self._queue.get(timeout=60)
        except queue.Empty:
            raise AssertionError(f"kubectl did not print {what}") from None


def test_apply_says_created_unchanged_configured(api: Api, widgets: str, namespace: str) -> None:
    name = "widget.widgets.test.springtide.dev/a"
    assert api.do("apply", "-n", namespace, "-f", "-", stdin=widget()).strip() == f"{name} created"
    assert api.do("apply", "-n", namespace, "-f", "-", stdin=widget()).strip() == f"{name} unchanged"
    changed = widget(size=3, parts=[{"name": "m"}])
    assert api.do("apply", "-n", namespace, "-f", "-", stdin=changed).strip() == f"{name} configured"
    spec = json.loads(api.do("get", "wdg", "a", "-n", namespace, "-o", "json"))["spec"]
    assert (spec["size"], spec["parts"]) == (3, [{"name": "m"}])


def test_apply_merges_lists_of_builtin_kinds_by_name(api: Api, namespace: str) -> None:
    def apply(text: str) -> str:
        return api.do("apply", "-n", namespace, "-f", "-", stdin=text).strip()

    assert apply(DEPLOYMENT) == "deployment.apps/d created"
    assert apply(DEPLOYMENT) == "deployment.apps/d unchanged"
    api.do("set", "env", "deploy/d", "-c", "c", "C=3", "-n", namespace)
    changed = DEPLOYMENT.replace("two", "three").replace(', {name: B, value: "1"}', "")
    assert apply(changed) == "deployment.apps/d configured"
    spec = json.loads(api.do("get", "deploy", "d", "-n", namespace, "-o", "json"))["spec"]["template"]["spec"]
    first, second = spec["containers"]
    assert first["env"] == [{"name": "A", "value": "1"}, {"name": "C", "value": "3"}]
    assert (first["image"], second["image"]) == ("one", "three")
    assert spec["volumes"] == [{"name": "v", "emptyDir": {}}]


def test_get_shows_our_columns(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    api.do("patch", "wdg", "a", "-n", namespace, "--subresource=status", "--type=merge", "-p", status)
    head, row = api.do("get", "wdg", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "SIZE", "READY", "AGE"]
    assert row.split()[:3] == ["a", "2", "True"]
    head, row = api.do("get", "widgets", "-n", namespace, "-o", "wide").splitlines()
    assert head.split() == ["NAME", "SIZE", "READY", "COLOR", "AGE"]
    assert row.split()[3] == "red"
    assert (
        api.do("get", "wdg", "-n", namespace, "-o", "name").strip() == "widget.widgets.test.springtide.dev/a"
    )


def test_get_in_all_formats(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    shown = yaml.safe_load(api.do("get", "wdg", "a", "-n", namespace, "-o", "yaml"))
    assert shown["spec"]["maxSize"] == 10
    assert json.loads(api.do("get", "wdg", "-n", namespace, "-o", "json"))["items"][0]["kind"] == "Widget"
    assert api.do("get", "wdg", "a", "-n", namespace, "-o", "jsonpath={.spec.parts[0].name}") == "x"


def test_get_watch_prints_changes(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    with api.kubectl_running("get", "wdg", "-n", namespace, "-w") as process:
        lines = Lines(process)
        assert lines.next("the columns").split() == ["NAME", "SIZE", "READY", "AGE"]
        assert lines.next("the widget").split()[:2] == ["a", "2"]
        api.do("scale", "wdg/a", "-n", namespace, "--replicas=4")
        assert lines.next("the change").split()[:2] == ["a", "4"]
        api.do("apply", "-n", namespace, "-f", "-", stdin=widget("b"))
        assert lines.next("the second widget").split()[:2] == ["b", "2"]


def test_scale_and_its_refusal(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    done = api.do("scale", "wdg/a", "-n", namespace, "--replicas=7")
    assert done.strip() == "widget.widgets.test.springtide.dev/a scaled"
    assert api.do("get", "wdg", "a", "-n", namespace, "-o", "jsonpath={.spec.size}") == "7"
    refused = api.kubectl("scale", "wdg/a", "-n", namespace, "--replicas=11")
    assert refused.code == 1
    assert "size must not be greater than 10" in refused.err
    api.do("apply", "-n", namespace, "-f", "-", stdin=DEPLOYMENT)
    api.do("scale", "deploy/d", "-n", namespace, "--replicas=0", "--current-replicas=0")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"size": -1},
            "spec.size: Invalid value: -1: spec.size in body should be greater than or equal to 0",
        ),
        ({"color": "blue"}, 'spec.color: Unsupported value: "blue": supported values: "red", "green"'),
        (
            {"size": "x"},
            'spec.size: Invalid value: "string": spec.size in body must be of type integer: "string"',
        ),
        ({"color": None}, "spec.color"),
        ({"size": 12}, "size must not be greater than 10"),
        ({"parts": [{"name": "x"}, {"name": "x"}]}, "spec.parts[1]: Duplicate value"),
        ({"foo": 1}, 'strict decoding error: unknown field "spec.foo"'),
        ({"parts": [{"name": "a", "oops": 1}]}, 'unknown field "spec.parts[0].oops"'),
    ],
)
def test_wrong_manifests_are_refused_in_known_words(
    api: Api, widgets: str, namespace: str, spec: dict[str, Any], said: str
) -> None:
    refused = api.kubectl("create", "-n", namespace, "-f", "-", stdin=widget("wrong", **spec))
    assert refused.code == 1
    assert said in refused.err
    if "strict" not in said and "oops" not in said:
        assert refused.err.startswith('The Widget "wrong" is invalid:')


def test_an_unknown_field_is_refused_by_apply_too(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    refused = api.kubectl("apply", "-n", namespace, "-f", "-", stdin=widget(foo=1))
    assert refused.code == 1
    assert 'unknown field "spec.foo"' in refused.err


def test_patches(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    api.do("patch", "wdg", "a", "-n", namespace, "--type=merge", "-p", '{"spec":{"size":3}}')
    api.do(
        "patch", "wdg", "a", "-n", namespace, "--type=json", "-p", '[{"op":"remove","path":"/spec/parts"}]'
    )
    spec = json.loads(api.do("get", "wdg", "a", "-n", namespace, "-o", "json"))["spec"]
    assert (spec["size"], "parts" in spec) == (3, False)
    refused = api.kubectl("patch", "wdg", "a", "-n", namespace, "-p", '{"spec":{"size":4}}')
    assert refused.code == 1
    assert "strategic-merge-patch+json is not supported by" in refused.err
    api.do("label", "wdg", "a", "-n", namespace, "team=blue")
    api.do("annotate", "wdg", "a", "-n", namespace, "note=hello there")
    assert api.do("get", "wdg", "-n", namespace, "-l", "team in (blue)", "-o", "name").strip().endswith("/a")


def test_server_side_apply_and_its_conflict(api: Api, widgets: str, namespace: str) -> None:
    server_side = ("apply", "--server-side", "-n", namespace, "-f", "-")
    done = api.do(*server_side, stdin=widget())
    assert done.strip() == "widget.widgets.test.springtide.dev/a serverside-applied"
    api.do("patch", "wdg", "a", "-n", namespace, "--type=merge", "-p", '{"spec":{"size":5}}')
    refused = api.kubectl(*server_side, stdin=widget())
    assert refused.code == 1
    assert "Apply failed with 1 conflict: conflict with" in refused.err
    assert '"kubectl-patch" using widgets.test.springtide.dev/v1' in refused.err
    assert ": .spec.size" in refused.err
    assert "--force-conflicts" in refused.err
    api.do(*server_side, "--force-conflicts", stdin=widget())
    assert api.do("get", "wdg", "a", "-n", namespace, "-o", "jsonpath={.spec.size}") == "2"


def test_server_side_apply_removes_what_is_applied_no_more(api: Api, widgets: str, namespace: str) -> None:
    def spec() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(api.do("get", "wdg", "a", "-n", namespace, "-o", "json"))["spec"]
        return found

    one, two = ("apply", "--server-side", "-n", namespace, "-f", "-"), "--field-manager=second"
    api.do(*one, stdin=widget(labels={"a": "1", "b": "1"}, parts=[{"name": "x"}, {"name": "m"}]))
    api.do(*one, two, stdin=widget(labels={"b": "1", "c": "1"}, parts=[{"name": "m"}, {"name": "o"}]))
    assert [part["name"] for part in spec()["parts"]] == ["x", "m", "o"]
    api.do(*one, stdin=widget(labels={"a": "2"}, parts=[]))
    assert spec()["labels"] == {"a": "2", "b": "1", "c": "1"}
    assert [part["name"] for part in spec()["parts"]] == ["m", "o"]


def test_client_side_apply_can_become_server_side(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    api.do("apply", "--server-side", "-n", namespace, "-f", "-", stdin=widget(size=4))
    assert api.do("get", "wdg", "a", "-n", namespace, "-o", "jsonpath={.spec.size}") == "4"
    api.do("apply", "-n", namespace, "-f", "-", stdin=DEPLOYMENT)
    api.do("apply", "--server-side", "-n", namespace, "-f", "-", stdin=DEPLOYMENT)
    managed = yaml.safe_load(
        api.do("get", "deploy", "d", "-n", namespace, "-o", "yaml", "--show-managed-fields")
    )
    managers = {(m["manager"], m["operation"]) for m in managed["metadata"]["managedFields"]}
    assert ("kubectl", "Apply") in managers


def test_an_unknown_field_is_refused_by_server_side_apply(api: Api, widgets: str, namespace: str) -> None:
    refused = api.kubectl("apply", "--server-side", "-n", namespace, "-f", "-", stdin=widget(foo=1))
    assert refused.code == 1
    assert ".spec.foo: field not declared in schema" in refused.err


def test_wait_for_a_condition_and_for_deletion(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    with api.kubectl_running(
        "wait", "--for=condition=Ready", "wdg/a", "-n", namespace, "--timeout=60s"
    ) as process:
        status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        api.do("patch", "wdg", "a", "-n", namespace, "--subresource=status", "--type=merge", "-p", status)
        assert Lines(process).next("that the condition is met").endswith("/a condition met")
    refused = api.kubectl("wait", "--for=condition=Never", "wdg/a", "-n", namespace, "--timeout=1s")
    assert "timed out waiting for the condition" in refused.err


def test_delete_waits_for_finalizers(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    hold = '{"metadata":{"finalizers":["test.springtide.dev/hold"]}}'
    api.do("patch", "wdg", "a", "-n", namespace, "--type=merge", "-p", hold)
    with api.kubectl_running("delete", "wdg", "a", "-n", namespace) as process:
        assert "deleted" in Lines(process).next("that it is deleted")
        path = f"{widgets}/namespaces/{namespace}/widgets/a"
        api.until("the mark", lambda: api.ok("GET", path)["metadata"].get("deletionTimestamp"))
        assert process.poll() is None
        api.do("patch", "wdg", "a", "-n", namespace, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        assert process.wait(60) == 0
    gone = api.kubectl("get", "wdg", "a", "-n", namespace)
    assert 'Error from server (NotFound): widgets.widgets.test.springtide.dev "a" not found' in gone.err


def test_explain_and_api_resources(api: Api, widgets: str) -> None:
    text = api.do("explain", "wdg.spec", "--api-version=widgets.test.springtide.dev/v1")
    assert "What the widget should be." in text
    assert "How large the widget is." in text
    assert "-required-" in text
    assert "Compute Resources required by this container" in api.do(
        "explain", "pod.spec.containers.resources"
    )
    listed = api.do("api-resources", "--api-group=widgets.test.springtide.dev").splitlines()
    assert listed[1].split() == ["widgets", "wdg", "widgets.test.springtide.dev/v1", "true", "Widget"]
    assert "widgets.test.springtide.dev/v1" in api.do("api-versions").split()


def test_describe_shows_events_and_events_lists_them(api: Api, widgets: str, namespace: str) -> None:
    api.do("apply", "-n", namespace, "-f", "-", stdin=widget())
    made = json.loads(api.do("get", "wdg", "a", "-n", namespace, "-o", "json"))
    involved = {key: made["metadata"][key] for key in ("name", "namespace", "uid")}
    event = {
        "metadata": {"generateName": "a."},
        "involvedObject": {**involved, "kind": "Widget", "apiVersion": made["apiVersion"]},
        "reason": "Grown",
        "message": "the widget grew",
        "type": "Normal",
        "count": 1,
        "source": {"component": "tester"},
        "firstTimestamp": made["metadata"]["creationTimestamp"],
        "lastTimestamp": made["metadata"]["creationTimestamp"],
    }
    api.ok("POST", f"/api/v1/namespaces/{namespace}/events", event)
    text = api.do("describe", "wdg", "a", "-n", namespace)
    assert "Color:     red" in text
    assert "Grown" in text
    assert "the widget grew" in text
    listed = api.do("events", "-n", namespace, "--for", "widget.widgets.test.springtide.dev/a")
    assert "Grown" in listed
    head = api.do("get", "events", "-n", namespace).splitlines()[0]
    assert head.split() == ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]


def test_imperative_commands_write_builtin_kinds(api: Api, namespace: str) -> None:
    api.do("create", "configmap", "c", "--from-literal=a=b", "-n", namespace)
    api.do("create", "secret", "generic", "s", "--from-literal=k=v", "-n", namespace)
    api.do("create", "serviceaccount", "robot", "-n", namespace)
    api.do("create", "quota", "q", "--hard=pods=3", "-n", namespace)
    api.do("create", "pdb", "p", "--min-available=1", "--selector=app=d", "-n", namespace)
    api.do("create", "role", "r", "--verb=get,list", "--resource=pods", "-n", namespace)
    api.do("create", "rolebinding", "b", "--role=r", f"--serviceaccount={namespace}:robot", "-n", namespace)
    api.do("create", "service", "clusterip", "web", "--tcp=80:8080", "-n", namespace)
    api.do("create", "deployment", "d", "--image=none.invalid/x", "--replicas=0", "-n", namespace)
    read = ("-n", namespace, "-o")
    assert api.do("get", "cm", "c", *read, "jsonpath={.data.a}") == "b"
    assert api.do("get", "secret", "s", *read, "jsonpath={.data.k}") == "dg=="
    assert api.do("get", "quota", "q", *read, "jsonpath={.spec.hard.pods}") == "3"
    assert api.do("get", "pdb", "p", *read, "jsonpath={.spec.minAvailable}") == "1"
    assert api.do("get", "role", "r", *read, "jsonpath={.rules[0].verbs}") == '["get","list"]'
    assert api.do("get", "svc", "web", *read, "jsonpath={.spec.ports[0].targetPort}") == "8080"
    assert api.do("get", "deploy", "d", *read, "jsonpath={.spec.replicas}") == "0"
    token = api.do("create", "token", "robot", "-n", namespace).strip()
    assert token.count(".") == 2
