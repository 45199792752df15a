"""Which release of several may act: the pure decision, and the looks that feed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.releases import GONE_SECONDS, Answer, Claim, Holding, claim_of, decide
from springtide_operator.settings import BadEnvironmentError, read_settings

Object = dict[str, Any]

OWN = Claim("staging", "second")
OTHER = Claim("production", "first")


def holding(claim: Claim, made: str = "2026-01-01T00:00:00Z", **changes: Any) -> Holding:
    return replace(
        Holding(claim, f"pod-of-{claim.release}", "r1", (made, claim.namespace), live=True), **changes
    )


def test_alone_it_may_act() -> None:
    assert decide(OWN, False, []) == (Answer.FREE, "")
    assert decide(OWN, False, [holding(OWN)])[0] is Answer.FREE


def test_live_release_of_the_class_is_named_with_what_to_do() -> None:
    answer, why = decide(OWN, False, [holding(OTHER)])
    assert answer is Answer.REFUSE
    for text in (
        "'first'",
        "production/springtide-operator",
        "held by pod-of-first",
        "'springtide.dev/operator'",
        "all namespaces",
        "jobs.managedBy",
        "watchNamespaces",
    ):
        assert text in why


@pytest.mark.parametrize(
    "other",
    [
        replace(OTHER, managed_by="example.com/other"),
        replace(OTHER, watched=("team-b",)),
    ],
)
def test_release_without_jobs_in_common_is_no_rival(other: Claim) -> None:
    own = replace(OWN, watched=("team-a",))
    assert decide(own, False, [holding(other)]) == (Answer.FREE, "")


@pytest.mark.parametrize(("own", "other"), [((), ("a",)), (("a",), ()), (("a", "b"), ("b", "c")), ((), ())])
def test_one_namespace_in_common_is_enough(own: tuple[str, ...], other: tuple[str, ...]) -> None:
    found = [holding(replace(OTHER, watched=other))]
    assert decide(replace(OWN, watched=own), False, found)[0] is Answer.REFUSE


def test_unrenewed_lease_is_waited_for_and_then_ignored() -> None:
    found = holding(OTHER, live=False, unchanged=GONE_SECONDS - 1)
    answer, why = decide(OWN, False, [found])
    assert answer is Answer.WAIT
    assert "production/springtide-operator" in why
    assert decide(OWN, False, [replace(found, unchanged=GONE_SECONDS)]) == (Answer.FREE, "")


def test_lease_that_was_given_back_is_no_rival() -> None:
    assert decide(OWN, False, [holding(OTHER, holder="")])[0] is Answer.FREE


def test_of_two_that_act_the_older_lease_stays() -> None:
    """Compare the two sides: they see the same Leases, so exactly one of them ends."""
    both = [holding(OTHER, "2026-01-01T00:00:00Z"), holding(OWN, "2026-01-02T00:00:00Z")]
    assert decide(OWN, True, both)[0] is Answer.REFUSE
    assert decide(OTHER, True, both)[0] is Answer.FREE
    assert decide(OTHER, False, both)[0] is Answer.FREE, "its standby knows that another replica acts"


def test_another_release_in_the_namespace_is_refused() -> None:
    other = Claim(OWN.namespace, "neighbour", "example.com/other")
    answer, why = decide(OWN, False, [holding(other)])
    assert answer is Answer.REFUSE
    assert "another namespace" in why
    older = Claim(OWN.namespace, "", "")
    assert decide(OWN, False, [holding(older)])[0] is Answer.FREE, "an older version of this very release"


def test_lease_says_what_its_release_runs() -> None:
    claim = Claim("ns", "lab", "example.com/lab", ("a", "b"))
    lease: Object = {"metadata": {"namespace": "ns", "annotations": claim.notes}}
    assert claim_of(lease) == claim
    assert claim_of({"metadata": {"namespace": "ns"}}) == Claim("ns", "", names.DEFAULT_CLASS)


# ---- jobs


def job(spec: Object) -> Object:
    meta = {"name": "digits", "namespace": "default", "uid": "u", "resourceVersion": "1"}
    return {"kind": names.KIND, "metadata": meta, "spec": spec}


@pytest.mark.parametrize("spec", [{"managedBy": "lab"}, {"managedBy": "lab", "suspend": "x" * 300_000}])
def test_jobs_of_another_class_are_as_if_not_there(spec: Object) -> None:
    """Also one that is too large to be worked with: not even that is said of it."""
    heard: list[object] = []
    cache = Cache(heard.append)
    assert not cache.put_job(job(spec))
    assert not cache.put_job(records.job(job(spec)))
    cache.keep_jobs({"u"}, "5")
    assert (cache.job_keys(), heard) == ([], [])
    theirs = Cache(managed_by="lab")
    assert theirs.put_job(records.job(job(spec)))
    assert theirs.job_keys() == [("default", "digits")]


def test_a_job_may_name_the_default_class() -> None:
    cache = Cache()
    assert cache.put_job(job({"managedBy": names.DEFAULT_CLASS}))


@pytest.mark.parametrize("text", ["two words", "/x", "x" * 64, "Upper.Domain/x"])
def test_class_that_no_job_could_have_is_refused(text: str) -> None:
    with pytest.raises(BadEnvironmentError, match="SPRINGTIDE_MANAGED_BY is"):
        read_settings({"SPRINGTIDE_MANAGED_BY": text})
