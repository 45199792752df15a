"""`springtide audit`: proved, disproved, or nothing to prove yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cli_fake_kube import FakeKube, job

from springtide_cli.apply import JOBS
from springtide_cli.audit import audit, audit_job
from springtide_cli.errors import Refused

DATA = {"epoch": 3, "seen": 20, "repeated": 0, "lost": 0, "skipped": 1, "totalSeen": 320}


def said(found: Any) -> str:
    return "\n".join(line.text for line in found.lines)


@pytest.mark.parametrize(
    ("change", "samples", "code", "text"),
    [
        ({}, None, 0, "exactly once: in each closed pass"),
        ({}, 100, 0, "samples whose gradients are in the parameters: 320"),
        ({}, 101, 1, "3 passes of 101 samples and 20 more are 323, not 320"),
        ({"repeated": 2}, None, 1, "NOT exactly once: 2 samples were repeated and 0 lost"),
        ({"lost": 1, "totalSeen": 319}, 100, 1, "0 samples were repeated and 1 lost; 3 passes of 100"),
        ({"epoch": 0, "totalSeen": 20}, None, 2, "no pass is closed yet"),
    ],
)
def test_what_the_ledger_proves(change: dict[str, int], samples: int | None, code: int, text: str) -> None:
    found = audit(job(state="Running", step=17, data=DATA | change), samples)
    assert found.code == code
    assert text in said(found)
    assert "digits (Running), step 17" in said(found)


TAKEN = {"step": 17, "totalSeen": 320, "samples": 20, "shards": "0-3,5", "begun": "4:2"}
ENDLESS = DATA | {"epoch": 0, "seen": 20, "totalSeen": 20}


@pytest.mark.parametrize(
    ("change", "taken", "code", "text"),
    [
        ({}, {}, 0, "exactly once, up to step 17"),
        ({}, {}, 0, "shards taken whole, by their place in the pass: 0-3,5"),
        ({"seen": 19}, {}, 1, "20 samples lie before the positions of the running pass, and 19 of it"),
        ({}, {"samples": 21}, 1, "NOT exactly once: 21 samples lie before the positions"),
        ({"repeated": 1}, {}, 1, "NOT exactly once: 1 samples were repeated"),
        # Written before an operator of a release that does not know the field went on.
        ({}, {"totalSeen": 12, "samples": 12, "step": 9}, 2, "not known; it was last told after step 9"),
    ],
)
def test_what_was_taken_of_shards_proves_the_running_pass(
    change: dict[str, int], taken: dict[str, Any], code: int, text: str
) -> None:
    told = TAKEN | {"totalSeen": 20} | taken
    found = audit(job(state="Running", step=17, data=ENDLESS | change | {"taken": told}))
    assert found.code == code
    assert text in said(found)


def test_an_old_account_of_shards_disproves_no_closed_pass() -> None:
    old = TAKEN | {"totalSeen": 300, "samples": 3}
    found = audit(job(state="Running", step=17, data=DATA | {"taken": old}), 100)
    assert found.code == 0
    assert "not known" in said(found)


def test_a_job_that_has_not_trained() -> None:
    found = audit(job())
    assert found.code == 2
    assert "no step has been committed" in said(found)


def test_of_a_cluster() -> None:
    kube = FakeKube()
    kube.answers["GET", f"{JOBS}/namespaces/default/trainingjobs/digits"] = job(state="Succeeded", data=DATA)
    assert asyncio.run(audit_job(kube, "digits", "default", None)).code == 0
    with pytest.raises(Refused, match="not found"):
        asyncio.run(audit_job(kube, "other", "default", None))
