"""Label and field selectors."""

from __future__ import annotations

import pytest

from springtide_local.api.selectors import field, parse_field_selector, parse_label_selector, selector_of
from springtide_local.ports import ApiError

LABELS = {"app": "web", "tier": "back", "n": "5"}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("app", True),
        ("!app", False),
        ("!other", True),
        ("app=web", True),
        ("app==web", True),
        ("app=db", False),
        ("app!=web", False),
        ("other!=web", True),
        ("app in (web,db)", True),
        ("app in (db)", False),
        ("app notin (db)", True),
        ("other notin (db)", True),
        ("app notin (web)", False),
        ("app=web,tier in (back, front),!x", True),
        ("app=web,tier=front", False),
        ("n>4", True),
        ("n<5", False),
        ("app>1", False),
        ("springtide.dev/job=", False),
    ],
)
def test_label_selectors(text: str, matches: bool) -> None:
    assert parse_label_selector(text).matches(LABELS) is matches


@pytest.mark.parametrize("text", ["a b", "=x", "a in web", "a=b=c", "a=b,,", "-a=b", "a=b!"])
def test_malformed_label_selectors_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_label_selector(text)
    assert caught.value.code == 400


def test_selector_objects() -> None:
    assert not selector_of(None).matches(LABELS)
    assert selector_of({}).matches(LABELS)
    assert selector_of({"matchLabels": {"app": "web"}}).matches(LABELS)
    expression = {"key": "tier", "operator": "In", "values": ["front"]}
    assert not selector_of({"matchLabels": {"app": "web"}, "matchExpressions": [expression]}).matches(LABELS)
    assert not selector_of({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}).matches(LABELS)


def test_field_selectors() -> None:
    extra = {
        "spec.nodeName": field("spec", "nodeName"),
        "spec.hostNetwork": field("spec", "hostNetwork", empty="false"),
    }
    pod = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "one"}}
    for text, matches in (
        ("metadata.name=p", True),
        ("metadata.name!=p", False),
        ("spec.nodeName=one,metadata.namespace==n", True),
        ("spec.nodeName=", False),
        ("spec.hostNetwork=false", True),
    ):
        assert parse_field_selector(text, extra).matches(pod) is matches
    assert parse_field_selector("metadata.name=p", {}).only("metadata.name") == "p"
    assert parse_field_selector("metadata.name!=p", {}).only("metadata.name") is None
    with pytest.raises(ApiError, match=r"field label not supported: spec\.color"):
        parse_field_selector("spec.color=red", extra)
    with pytest.raises(ApiError, match="invalid selector"):
        parse_field_selector("nonsense", extra)
