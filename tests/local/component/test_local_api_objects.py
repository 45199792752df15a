"""Objects over HTTP, on any cluster: writes, refusals, subresources, deletion."""

from __future__ import annotations

from typing import Any

from local_api import Api

pytest_plugins = ["local_api_fixtures"]

MERGE = "application/merge-patch+json"


def widget(name: str = "a", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "widgets.test.springtide.dev/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": {"color": "red", **spec},
    }


def pod(name: str = "p", **spec: Any) -> dict[str, Any]:
    # No node carries this name, so that no kubelet takes part.
    chosen = {"nodeSelector": {"api-test": "never"}, **spec}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "none.invalid/x"}], **chosen},
    }


class Home:
    """Paths of one namespace."""

    def __init__(self, widgets: str, namespace: str) -> None:
        self.widgets = f"{widgets}/namespaces/{namespace}/widgets"
        self.core = f"/api/v1/namespaces/{namespace}"
        self.pods = f"{self.core}/pods"


def test_created_object_is_completed_with_defaults_and_identity(
    api: Api, widgets: str, namespace: str
) -> None:
    made = api.ok("POST", Home(widgets, namespace).widgets, widget())
    assert made["spec"] == {"color": "red", "size": 1, "maxSize": 10}
    assert made["metadata"]["generation"] == 1
    assert made["metadata"]["namespace"] == namespace
    assert made["metadata"]["uid"]
    assert int(made["metadata"]["resourceVersion"]) > 0


def test_generate_name_gives_different_names(api: Api, widgets: str, namespace: str) -> None:
    body = widget()
    body["metadata"] = {"generateName": "gen-"}
    names = {api.ok("POST", Home(widgets, namespace).widgets, body)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("gen-") and len(name) == 9 for name in names)


def test_the_same_name_twice_already_exists(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    api.ok("POST", path, widget())
    status, answer, _ = api.request("POST", path, widget())
    assert (status, answer["reason"]) == (409, "AlreadyExists")
    assert answer["message"] == 'widgets.widgets.test.springtide.dev "a" already exists'


def test_each_wrong_field_is_a_cause(api: Api, widgets: str, namespace: str) -> None:
    wrong = widget(size=-1, color="blue", parts=[{"name": "UP"}, {"weight": 10}], port=True)
    status, answer, _ = api.request("POST", Home(widgets, namespace).widgets, wrong)
    assert (status, answer["reason"]) == (422, "Invalid")
    causes = {cause["field"]: cause["message"] for cause in answer["details"]["causes"]}
    assert causes["spec.size"] == (
        "Invalid value: -1: spec.size in body should be greater than or equal to 0"
    )
    assert causes["spec.color"] == 'Unsupported value: "blue": supported values: "red", "green"'
    assert "should match '^[a-z]+$'" in causes["spec.parts[0].name"]
    assert causes["spec.parts[1].name"] == "Required value"
    assert "should be less than or equal to 9" in causes["spec.parts[1].weight"]
    assert "must be of type integer,string" in causes["spec.port"]
    assert answer["details"]["kind"] == "Widget"


def test_a_wrong_type_is_named(api: Api, widgets: str, namespace: str) -> None:
    status, answer, _ = api.request("POST", Home(widgets, namespace).widgets, widget(size="many"))
    assert status == 422
    assert (
        'spec.size: Invalid value: "string": spec.size in body must be of type integer: "string"'
        in (answer["message"])
    )


def test_rules_do_not_run_after_a_wrong_type(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    _, answer, _ = api.request("POST", path, widget(size="many"))
    unchecked = "some validation rules were not checked because the object was invalid"
    assert any(unchecked in cause["message"] for cause in answer["details"]["causes"])
    _, answer, _ = api.request("POST", path, widget(size=-1))
    assert unchecked not in answer["message"]


def test_definition_that_kubernetes_refuses_is_refused(api: Api) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?dryRun=All&fieldValidation=Strict"
    group = "refused.test.springtide.dev"
    rule = {"rule": "true", "message": "x", "messageExpression": "'x is ' + string(self.x)"}
    spec = {"type": "object", "properties": {"x": {"type": "integer"}}, "x-kubernetes-validations": [rule]}
    raw = {"type": "object", "properties": {"spec": spec}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": raw}}],
        },
    }
    status, answer, _ = api.request("POST", path, definition)
    place = "spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].messageExpression"
    said = "Forbidden: estimated messageExpression cost exceeds budget by factor of more than 100x"
    assert status == 422
    assert f"{place}: {said}" in answer["message"]
    del rule["messageExpression"]
    assert api.request("POST", path, definition)[0] == 201
    spec["maxlength"] = 3
    status, answer, _ = api.request("POST", path, definition)
    assert status == 400
    assert 'unknown field "spec.versions[0].schema.openAPIV3Schema.properties.spec.maxlength"' in str(answer)


def test_patch_by_another_version_is_taken(api: Api, namespace: str) -> None:
    group = "versions.test.springtide.dev"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    versions = [
        {"name": name, "served": True, "storage": name == "v2", "schema": schema} for name in ("v1", "v2")
    ]
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"gadgets.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "gadgets", "kind": "Gadget"},
            "versions": versions,
        },
    }
    api.ok("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    there = f"/apis/{group}/%s/namespaces/{namespace}/gadgets"
    api.ok("POST", there % "v2", {"apiVersion": f"{group}/v2", "kind": "Gadget", "metadata": {"name": "a"}})
    patched = api.ok("PATCH", f"{there % 'v1'}/a", {"spec": {"x": 1}}, MERGE)
    assert (patched["apiVersion"], patched["spec"]) == (f"{group}/v1", {"x": 1})
    assert api.ok("GET", f"{there % 'v2'}/a")["apiVersion"] == f"{group}/v2"


def test_a_rule_and_a_transition_rule_refuse(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    status, answer, _ = api.request("POST", path, widget(size=11))
    assert status == 422
    assert "size must not be greater than 10" in answer["message"]
    api.ok("POST", path, widget())
    status, answer, _ = api.request("PATCH", f"{path}/a", {"spec": {"color": "green"}}, MERGE)
    assert status == 422
    assert answer["details"]["causes"][0]["field"] == "spec.color"
    assert "color is immutable" in answer["message"]


def test_unknown_fields_are_pruned_with_warning_or_refused(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    status, made, headers = api.request("POST", path, widget(foo=1, template={"any": {"thing": 1}}))
    assert status == 201
    assert "foo" not in made["spec"]
    assert made["spec"]["template"] == {"any": {"thing": 1}}
    assert 'unknown field \\"spec.foo\\"' in headers["Warning"]
    status, answer, _ = api.request("POST", f"{path}?fieldValidation=Strict", widget("b", foo=1))
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert 'strict decoding error: unknown field "spec.foo"' in answer["message"]
    _, made, headers = api.request("POST", f"{path}?fieldValidation=Ignore", widget("c", foo=1))
    assert "foo" not in made["spec"]
    assert headers["Warning"] is None


def test_status_and_spec_are_written_apart(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a"
    api.ok("POST", Home(widgets, namespace).widgets, widget())
    both = {"spec": {"size": 5}, "status": {"size": 5}}
    main = api.ok("PATCH", path, both, MERGE)
    assert (main["spec"]["size"], main.get("status")) == (5, None)
    assert main["metadata"]["generation"] == 2
    sub = api.ok("PATCH", f"{path}/status", {"spec": {"size": 7}, "status": {"size": 7}}, MERGE)
    assert (sub["spec"]["size"], sub["status"]["size"]) == (5, 7)
    assert sub["metadata"]["generation"] == 2


def test_scale_reads_and_writes_the_size(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a"
    api.ok("POST", Home(widgets, namespace).widgets, widget(size=2))
    api.ok("PATCH", f"{path}/status", {"status": {"size": 1, "selector": "a=b"}}, MERGE)
    scale = api.ok("GET", f"{path}/scale")
    assert scale["kind"] == "Scale"
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": "a=b"}
    scale["spec"]["replicas"] = 4
    assert api.ok("PUT", f"{path}/scale", scale)["spec"] == {"replicas": 4}
    assert api.ok("GET", path)["spec"]["size"] == 4
    status, answer, _ = api.request("PATCH", f"{path}/scale", {"spec": {"replicas": 99}}, MERGE)
    assert status == 422
    assert "size must not be greater than 10" in answer["message"]


def test_an_old_resource_version_conflicts(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a"
    old = api.ok("POST", Home(widgets, namespace).widgets, widget())
    api.ok("PATCH", path, {"metadata": {"labels": {"x": "y"}}}, MERGE)
    status, answer, _ = api.request("PUT", path, old)
    assert (status, answer["reason"]) == (409, "Conflict")
    assert (
        "the object has been modified; please apply your changes to the latest version" in answer["message"]
    )
    del old["metadata"]["resourceVersion"]
    status, answer, _ = api.request("PUT", path, old)
    assert status == 422
    assert (
        "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update" in answer["message"]
    )


def test_a_write_that_changes_nothing_keeps_the_version(api: Api, widgets: str, namespace: str) -> None:
    made = api.ok("POST", Home(widgets, namespace).widgets, widget())
    again = api.ok("PATCH", f"{Home(widgets, namespace).widgets}/a", {"spec": {"size": 1}}, MERGE)
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_dry_run_answers_and_stores_nothing(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    assert api.ok("POST", f"{path}?dryRun=All", widget())["spec"]["size"] == 1
    assert api.request("GET", f"{path}/a")[0] == 404
    api.ok("POST", path, widget())
    assert api.ok("PATCH", f"{path}/a?dryRun=All", {"spec": {"size": 3}}, MERGE)["spec"]["size"] == 3
    api.ok("DELETE", f"{path}/a?dryRun=All")
    assert api.ok("GET", f"{path}/a")["spec"]["size"] == 1


def test_a_finalizer_holds_a_deleted_object(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    body = widget()
    body["metadata"]["finalizers"] = ["test.springtide.dev/hold"]
    api.ok("POST", path, body)
    assert api.ok("DELETE", f"{path}/a")["metadata"]["deletionTimestamp"]
    more = {"metadata": {"finalizers": ["test.springtide.dev/hold", "test.springtide.dev/more"]}}
    status, answer, _ = api.request("PATCH", f"{path}/a", more, MERGE)
    assert status == 422
    assert "no new finalizers can be added if the object is being deleted" in answer["message"]
    api.ok("PATCH", f"{path}/a", {"metadata": {"finalizers": None}}, MERGE)
    status, answer, _ = api.request("GET", f"{path}/a")
    assert (status, answer["message"]) == (404, 'widgets.widgets.test.springtide.dev "a" not found')


def test_delete_preconditions(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    made = api.ok("POST", path, widget())
    for wrong in ({"uid": "00000000-0000-0000-0000-000000000000"}, {"resourceVersion": "1"}):
        status, answer, _ = api.request("DELETE", f"{path}/a", {"preconditions": wrong})
        assert status == 409
        assert "in the precondition" in answer["message"]
        assert "does not match the" in answer["message"]
    api.ok("DELETE", f"{path}/a", {"preconditions": {"uid": made["metadata"]["uid"]}})
    assert api.request("GET", f"{path}/a")[0] == 404


def test_dependents_go_with_their_owner(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    owner = api.ok("POST", home.widgets, widget())
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": "Widget",
        "name": "a",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    for name, uid in (("mine", reference["uid"]), ("astray", "11111111-1111-1111-1111-111111111111")):
        meta = {"name": name, "ownerReferences": [{**reference, "uid": uid}]}
        api.ok("POST", f"{home.core}/configmaps", {"metadata": meta})
    api.until(
        "the dependent without owner to go",
        lambda: api.request("GET", f"{home.core}/configmaps/astray")[0] == 404,
    )
    assert api.request("GET", f"{home.core}/configmaps/mine")[0] == 200
    api.ok("DELETE", f"{home.widgets}/a", {"propagationPolicy": "Background"})
    api.until("the dependent to go", lambda: api.request("GET", f"{home.core}/configmaps/mine")[0] == 404)


def test_orphans_stay(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    owner = api.ok("POST", home.widgets, widget())["metadata"]
    reference = {
        "apiVersion": "widgets.test.springtide.dev/v1",
        "kind": "Widget",
        "name": "a",
        "uid": owner["uid"],
    }
    api.ok("POST", f"{home.core}/configmaps", {"metadata": {"name": "c", "ownerReferences": [reference]}})
    api.request("DELETE", f"{home.widgets}/a", {"propagationPolicy": "Orphan"})
    api.until("the owner to go", lambda: api.request("GET", f"{home.widgets}/a")[0] == 404)
    assert not api.ok("GET", f"{home.core}/configmaps/c")["metadata"].get("ownerReferences")


def test_a_deleted_namespace_empties_and_refuses(api: Api, widgets: str) -> None:
    with api.namespace() as name:
        home = Home(widgets, name)
        body = widget()
        body["metadata"]["finalizers"] = ["test.springtide.dev/hold"]
        api.ok("POST", home.widgets, body)
        api.ok("POST", f"{home.core}/configmaps", {"metadata": {"name": "c"}})
        api.ok("DELETE", f"/api/v1/namespaces/{name}")
        assert api.ok("GET", f"/api/v1/namespaces/{name}")["status"]["phase"] == "Terminating"
        status, answer, _ = api.request("POST", f"{home.core}/configmaps", {"metadata": {"name": "d"}})
        assert status == 403
        assert (
            f"unable to create new content in namespace {name} because it is being terminated"
            in answer["message"]
        )
        api.until("the contents to go", lambda: api.request("GET", f"{home.core}/configmaps/c")[0] == 404)
        api.until(
            "the widget to be deleted",
            lambda: api.ok("GET", f"{home.widgets}/a")["metadata"].get("deletionTimestamp"),
        )
        api.ok("PATCH", f"{home.widgets}/a", {"metadata": {"finalizers": None}}, MERGE)
        api.until("the namespace to go", lambda: api.request("GET", f"/api/v1/namespaces/{name}")[0] == 404)


def test_namespace_has_service_account_and_a_missing_is_named(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    api.until("the default service account", lambda: api.request("GET", path)[0] == 200)
    status, answer, _ = api.request(
        "POST", "/api/v1/namespaces/no-such-space/configmaps", {"metadata": {"name": "c"}}
    )
    assert (status, answer["message"]) == (404, 'namespaces "no-such-space" not found')


def test_a_pod_is_defaulted_checked_and_its_spec_is_fixed(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    api.until(
        "the service account", lambda: api.request("GET", f"{home.core}/serviceaccounts/default")[0] == 200
    )
    made = api.ok("POST", home.pods, pod())
    assert made["spec"]["restartPolicy"] == "Always"
    assert made["spec"]["terminationGracePeriodSeconds"] == 30
    assert made["spec"]["containers"][0]["terminationMessagePath"] == "/dev/termination-log"
    assert made["status"]["phase"] == "Pending"
    status, answer, _ = api.request("PATCH", f"{home.pods}/p", {"spec": {"restartPolicy": "Never"}}, MERGE)
    assert status == 422
    assert "pod updates may not change fields other than" in answer["message"]
    bad = pod("q", volumes=[{"name": "v", "emptyDir": {}}])
    bad["spec"]["containers"] = [
        {"name": "c", "image": "x", "volumeMounts": [{"name": "w", "mountPath": "/w"}]},
        {"name": "c"},
    ]
    status, answer, _ = api.request("POST", home.pods, bad)
    assert status == 422
    causes = {cause["field"]: cause["message"] for cause in answer["details"]["causes"]}
    assert causes["spec.containers[0].volumeMounts[0].name"] == 'Not found: "w"'
    assert causes["spec.containers[1].name"] == 'Duplicate value: "c"'
    assert causes["spec.containers[1].image"] == "Required value"


def test_an_unscheduled_pod_goes_at_once(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    api.until(
        "the service account", lambda: api.request("GET", f"{home.core}/serviceaccounts/default")[0] == 200
    )
    api.ok("POST", home.pods, pod())
    assert api.ok("DELETE", f"{home.pods}/p")["metadata"]["name"] == "p"
    api.until("the pod to go", lambda: api.request("GET", f"{home.pods}/p")[0] == 404)


def test_quota_and_pod_security_refuse_pods(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    api.until(
        "the service account", lambda: api.request("GET", f"{home.core}/serviceaccounts/default")[0] == 200
    )
    api.ok(
        "POST", f"{home.core}/resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    )

    def counted() -> bool:
        return api.ok("GET", f"{home.core}/resourcequotas/q").get("status", {}).get("used") == {"pods": "0"}

    api.until("the quota to be counted", counted)
    api.ok("POST", home.pods, pod("one"))
    status, answer, _ = api.request("POST", home.pods, pod("two"))
    assert (status, answer["reason"]) == (403, "Forbidden")
    assert answer["message"] == (
        'pods "two" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
    )
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    api.ok("PATCH", f"/api/v1/namespaces/{namespace}", labels, MERGE)
    status, answer, _ = api.request("POST", home.pods, pod("three"))
    assert status == 403
    assert (
        'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "c" must set'
        in (answer["message"])
    )


def test_services_get_an_address_each_that_never_changes(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).core}/services"
    made = [
        api.ok("POST", path, {"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}})
        for name in ("a", "b")
    ]
    first, second = (service["spec"]["clusterIP"] for service in made)
    assert first != second
    assert made[0]["spec"]["ports"][0]["targetPort"] == 80
    status, answer, _ = api.request("PATCH", f"{path}/a", {"spec": {"clusterIP": second}}, MERGE)
    assert status == 422
    assert "may not change once set" in answer["message"]
    made[0]["spec"].pop("clusterIP")
    made[0]["spec"].pop("clusterIPs")
    assert api.ok("PUT", f"{path}/a", made[0])["spec"]["clusterIP"] == first


def test_secret_texts_are_encoded(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).core}/secrets"
    made = api.ok("POST", path, {"metadata": {"name": "s"}, "stringData": {"token": "abc"}})
    assert made["data"] == {"token": "YWJj"}
    assert "stringData" not in made
    status, answer, _ = api.request("POST", path, {"metadata": {"name": "t"}, "data": {"bad key": "YQ=="}})
    assert status == 422
    assert "a valid config key must consist of" in answer["message"]


def test_events_are_seen_in_both_groups(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).core}/events"
    involved = {
        "kind": "Widget",
        "name": "a",
        "namespace": namespace,
        "apiVersion": "widgets.test.springtide.dev/v1",
    }
    event = {
        "metadata": {"name": "e"},
        "involvedObject": involved,
        "reason": "Tried",
        "message": "it was tried",
        "type": "Normal",
        "count": 1,
    }
    api.ok("POST", path, event)
    listed = api.ok("GET", f"{path}?fieldSelector=involvedObject.name=a,reason=Tried")
    assert [item["message"] for item in listed["items"]] == ["it was tried"]
    new = api.ok("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events/e")
    assert (new["note"], new["regarding"]["name"], new["apiVersion"]) == (
        "it was tried",
        "a",
        "events.k8s.io/v1",
    )


def test_json_patch_and_its_refusals(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a"
    api.ok("POST", Home(widgets, namespace).widgets, widget(size=2))
    kind = "application/json-patch+json"
    ops = [
        {"op": "test", "path": "/spec/size", "value": 2},
        {"op": "replace", "path": "/spec/size", "value": 3},
    ]
    assert api.ok("PATCH", path, ops, kind)["spec"]["size"] == 3
    assert api.request("PATCH", path, ops, kind)[0] == 422
    assert api.request("PATCH", path, [{"op": "remove", "path": "/spec/none"}], kind)[0] == 422
    strategic = "application/strategic-merge-patch+json"
    status, answer, _ = api.request("PATCH", path, {"spec": {"size": 1}}, strategic)
    assert (status, answer["reason"]) == (415, "UnsupportedMediaType")


def test_a_collection_is_deleted_by_selector(api: Api, widgets: str, namespace: str) -> None:
    path = Home(widgets, namespace).widgets
    for name, label in (("a", "x"), ("b", "x"), ("c", "y")):
        body = widget(name)
        body["metadata"]["labels"] = {"kind": label}
        api.ok("POST", path, body)
    api.ok("DELETE", f"{path}?labelSelector=kind%3Dx")
    assert [item["metadata"]["name"] for item in api.ok("GET", path)["items"]] == ["c"]


def test_wrong_kinds_bodies_and_paths_get_clear_answers(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    status, answer, _ = api.request("POST", home.widgets, {**widget(), "kind": "Gadget"})
    assert status == 422
    assert 'kind: Invalid value: "Gadget": must be Widget' in answer["message"]
    status, answer, _ = api.request("POST", f"{home.core}/configmaps", {"kind": "Gadget"})
    assert status == 400
    assert "Gadget in version" in answer["message"]
    status, answer, _ = api.request("POST", home.widgets, b"{not json", "application/json")
    assert (status, answer["reason"]) == (400, "BadRequest")
    status, answer, _ = api.request("POST", home.widgets, b"x", "text/plain")
    assert status == 415
    assert api.request("GET", f"{home.core}/gadgets")[0] == 404
    assert api.request("PUT", home.widgets, widget())[0] == 405
    assert api.request("GET", f"{home.widgets}?labelSelector=a%20b%20c")[0] == 400
    assert api.request("GET", f"{home.widgets}?fieldSelector=spec.size%3D1")[0] == 400


def test_uid_of_a_patch_is_no_precondition(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a"
    made = api.ok("POST", Home(widgets, namespace).widgets, widget())
    status, answer, _ = api.request("PATCH", path, {"metadata": {"uid": "x"}}, MERGE)
    assert status == 422
    assert 'metadata.uid: Invalid value: "x": field is immutable' in answer["message"]
    made["metadata"]["uid"] = "x"
    status, answer, _ = api.request("PUT", path, made)
    assert (status, answer["reason"]) == (409, "Conflict")
    assert "Precondition failed: UID in precondition: x" in answer["message"]


def test_uid_of_an_applied_new_object_conflicts(api: Api, widgets: str, namespace: str) -> None:
    path = f"{Home(widgets, namespace).widgets}/a?fieldManager=test"
    new = widget()
    new["metadata"]["uid"] = "x"
    status, answer, _ = api.request("PATCH", path, new, "application/apply-patch+yaml")
    assert status == 409
    assert "the provided object specified uid x, and no existing object was found" in answer["message"]
    # A version of an object that is not there means no state of it.
    new["metadata"] = {"name": "a", "resourceVersion": "7"}
    made = api.ok("PATCH", path, new, "application/apply-patch+yaml")
    assert made["metadata"]["resourceVersion"] != "7"


def test_finalizer_without_domain_is_warned_of_or_refused(api: Api, widgets: str, namespace: str) -> None:
    home = Home(widgets, namespace)
    custom = widget()
    custom["metadata"]["finalizers"] = ["x"]
    status, _, headers = api.request("POST", home.widgets, custom)
    assert status == 201
    assert "prefer a domain-qualified finalizer name" in headers["Warning"]
    api.ok("PATCH", f"{home.widgets}/a", {"metadata": {"finalizers": None}}, MERGE)
    plain = {"metadata": {"name": "a", "finalizers": ["x"]}}
    status, answer, _ = api.request("POST", f"{home.core}/configmaps", plain)
    assert status == 422
    assert "neither a standard finalizer name nor is it fully qualified" in answer["message"]


def test_owner_that_is_not_whole_is_refused(api: Api, widgets: str, namespace: str) -> None:
    owned = {"metadata": {"name": "a", "ownerReferences": [{"name": "x"}]}}
    status, answer, _ = api.request("POST", f"{Home(widgets, namespace).core}/configmaps", owned)
    assert status == 422
    assert {(cause["field"], cause["message"]) for cause in answer["details"]["causes"]} == {
        ("metadata.ownerReferences.apiVersion", 'Invalid value: "": version must not be empty'),
        ("metadata.ownerReferences.kind", 'Invalid value: "": must not be empty'),
        ("metadata.ownerReferences.uid", 'Invalid value: "": must not be empty'),
    }
