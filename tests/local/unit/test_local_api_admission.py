"""Quota, limit ranges, pod security, disruption budgets: pure decisions."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api import quota
from springtide_local.api.eviction import Budget, budget
from springtide_local.api.objects import canonical_quantity, format_quantity, quantity
from springtide_local.api.pod_security import violations


def pod(phase: str = "Running", ready: bool = True, **resources: Any) -> dict[str, Any]:
    container = {"name": "c", "resources": resources}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [container]},
        "status": {"phase": phase, "conditions": conditions},
    }


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1Ki", "1024"),
        ("1.5Gi", "1610612736"),
        ("2e3", "2000"),
        ("1k", "1000"),
        ("-1", "-1"),
    ],
)
def test_quantities_are_numbers(text: str, amount: str) -> None:
    assert quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "abc", "1 Gi", "1GiB", "--1"])
def test_other_texts_are_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="quantities must match"):
        quantity(text)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (2, "2"),
        (0.5, "500m"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("1000", "1k"),
        ("1e3", "1k"),
        ("0", "0"),
        ("-500m", "-500m"),
        ("many", "many"),
        (True, True),
    ],
)
def test_quantities_have_one_form(given: Any, kept: Any) -> None:
    assert canonical_quantity(given) == kept


def test_counts_are_printed_plainly() -> None:
    assert [format_quantity(Decimal(n)) for n in (2048, 2**20, 2**20 + 1)] == ["2048", "1Mi", "1048577"]


@given(st.integers(0, 10**15))
def test_quantities_survive_being_printed(milli: int) -> None:
    amount = Decimal(milli) / 1000
    assert quantity(format_quantity(amount)) == amount


def limits(**hard: str) -> dict[str, Any]:
    named = {name.replace("_", "."): value for name, value in hard.items()}
    return {"metadata": {"name": "q"}, "spec": {"hard": named}}


def refusal(item: dict[str, Any], one: dict[str, Any], *others: dict[str, Any]) -> str | None:
    names = list(item["spec"]["hard"])
    used = quota.total({"pods": list(others)}, names)
    found = quota.check(item, "pods", one, used)
    return found.message if found is not None else None


def test_a_quota_counts_pods_that_run() -> None:
    assert refusal(limits(pods="2"), pod(), pod()) is None
    assert refusal(limits(pods="2"), pod(), pod(), pod()) == (
        "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2"
    )
    assert refusal(limits(pods="2"), pod(), pod("Succeeded"), pod("Failed"), pod()) is None


def test_a_quota_sums_requests_and_demands_them() -> None:
    one = pod(requests={"cpu": "600m"})
    assert refusal(limits(requests_cpu="1"), one, pod(requests={"cpu": "400m"})) is None
    assert refusal(limits(cpu="1"), one, pod(requests={"cpu": "500m"})) == (
        "exceeded quota: q, requested: cpu=600m, used: cpu=500m, limited: cpu=1"
    )
    assert refusal(limits(limits_memory="1Gi"), one) == "failed quota: q: must specify limits.memory for: c"


def test_object_counts_and_scopes() -> None:
    item = limits(**{"count/configmaps": "1"})
    assert quota.storages(list(item["spec"]["hard"])) == {"configmaps"}
    one = {"metadata": {"name": "c"}}
    used = quota.total({"configmaps": [one]}, ["count/configmaps"])
    found = quota.check(item, "configmaps", one, used)
    assert found is not None
    assert "count/configmaps=1" in found.message
    scoped = {**limits(pods="0")}
    scoped["spec"]["scopes"] = ["NotTerminating"]
    assert refusal(scoped, pod()) is None


def test_a_limit_range_fills_and_bounds() -> None:
    bounds = {"type": "Container", "max": {"cpu": "2"}, "min": {"cpu": "100m"}}
    item = {"spec": {"limits": [{**bounds, "default": {"cpu": "1"}, "defaultRequest": {"cpu": "500m"}}]}}
    spec = pod()["spec"]
    quota.apply_limit_range(item, spec)
    assert spec["containers"][0]["resources"] == {"limits": {"cpu": "1"}, "requests": {"cpu": "500m"}}
    assert quota.limit_range_problems(item, spec) == []
    spec = pod()["spec"]
    quota.apply_limit_range({"spec": {"limits": [bounds]}}, spec)
    assert spec["containers"][0]["resources"] == {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}
    greedy = pod(limits={"cpu": "3"}, requests={"cpu": "50m"})["spec"]
    assert quota.limit_range_problems(item, greedy) == [
        "maximum cpu usage per Container is 2, but limit is 3",
        "minimum cpu usage per Container is 100m, but request is 50m",
    ]


GOOD = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "c",
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
    ],
}


def test_a_restricted_pod_meets_every_level() -> None:
    for level in ("privileged", "baseline", "restricted"):
        assert violations(GOOD, level) == []


def test_a_plain_pod_meets_baseline_only() -> None:
    plain = {"containers": [{"name": "a"}, {"name": "b"}]}
    assert violations(plain, "baseline") == []
    found = violations(plain, "restricted")
    assert found == [
        'allowPrivilegeEscalation != false (containers "a", "b" must set '
        "securityContext.allowPrivilegeEscalation=false)",
        'unrestricted capabilities (containers "a", "b" must set securityContext.capabilities.drop=["ALL"])',
        'runAsNonRoot != true (pod or containers "a", "b" must set securityContext.runAsNonRoot=true)',
        'seccompProfile (pod or containers "a", "b" must set securityContext.seccompProfile.type to '
        '"RuntimeDefault" or "Localhost")',
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hostNetwork": True}, "host namespaces (hostNetwork=true)"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, 'hostPath volumes (volume "v")'),
        ({"containers": [{"name": "c", "securityContext": {"privileged": True}}]}, "privileged=true"),
        (
            {"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]},
            'hostPort (container "c" uses hostPort 80)',
        ),
        (
            {
                "containers": [
                    {"name": "c", "securityContext": {"capabilities": {"add": ["SYS_ADMIN", "CHOWN"]}}}
                ]
            },
            'must not include "SYS_ADMIN" in securityContext.capabilities.add',
        ),
    ],
)
def test_baseline_names_what_is_too_much(change: dict[str, Any], said: str) -> None:
    found = violations({"containers": [{"name": "c"}], **change}, "baseline")
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("spec", "pods", "controlled", "state"),
    [
        ({"minAvailable": 1}, [pod(), pod()], None, Budget(2, 1, 2, 1)),
        ({"minAvailable": 2}, [pod(), pod(ready=False)], None, Budget(1, 2, 2, 0)),
        ({"minAvailable": "50%"}, [pod(), pod(), pod()], 3, Budget(3, 2, 3, 1)),
        ({"maxUnavailable": 1}, [pod(), pod()], 3, Budget(2, 2, 3, 0)),
        ({"maxUnavailable": "34%"}, [pod(), pod(), pod()], 3, Budget(3, 1, 3, 2)),
        ({"minAvailable": 1}, [pod("Succeeded"), pod()], None, Budget(1, 1, 1, 0)),
        ({}, [pod(), pod()], None, Budget(2, 1, 2, 1)),
    ],
)
def test_disruption_budgets(
    spec: dict[str, Any], pods: list[dict[str, Any]], controlled: int | None, state: Budget
) -> None:
    assert budget(spec, pods, controlled) == state
