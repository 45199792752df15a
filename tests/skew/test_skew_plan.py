"""An operator goes on with a job whose status and pods are another release's, and takes nothing from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from releases import Tree

SCRIPT = Path(__file__).parents[1] / "support" / "skew_plan.py"

pytestmark = pytest.mark.timeout(120)


def run(tree: Tree, mode: str, given: str = "") -> Any:
    """Run the script with the packages and the cluster in memory of a release."""
    path = os.pathsep.join([tree.python_path, str(tree.folder / "tests" / "support")])
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), mode],
        env=os.environ | {"PYTHONPATH": path},
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "taken"), [("today", "last"), ("last", "today")])
def test_job_of_one_release_goes_on_with_an_operator_of_another(
    tree_of: Callable[[str], Tree], made: str, taken: str
) -> None:
    told = run(tree_of(taken), "take", json.dumps(run(tree_of(made), "make")))
    assert told["changed"] == [], "no pod comes or goes for the operator's sake"
    assert told["workers"] == ["digits-worker-0-1", "digits-worker-1-0"]
    assert (told["coordinators"], told["failures"]) == (1, 1)
