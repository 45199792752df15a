"""A network that breaks between two workers, both of which the coordinator reaches. The kernel really drops
their packets, in a network that is made for the test; that needs no rights where users may make them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "cut_network.py"
ALONE = ["unshare", "--user", "--map-root-user", "--net"]


def why_not() -> str:
    """Why no network can be made here; "" where it can."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    rules = "ip link set lo up && ip rule add pref 5 to 127.0.0.9 blackhole"
    tried = subprocess.run([*ALONE, "sh", "-c", rules], capture_output=True, text=True, timeout=60)
    return tried.stderr.strip() if tried.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sum_over_broken_line_fails_long_before_its_own_limit() -> None:
    """Whether both ranks have begun it, or one waits for the other's part."""
    if reason := why_not():
        pytest.skip(f"no network of its own: {reason}")
    done = subprocess.run(
        [*ALONE, sys.executable, str(SCRIPT)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=120,  # the collective's own limit is 600 s
    )
    assert done.returncode == 0, done.stderr[-4000:]
    groups = json.loads(done.stdout.strip().splitlines()[-1])
    assert [sorted(ends) for ends in groups] == [["0", "1"], ["0"], ["1"]]
    for ends in groups:
        assert all(ends.values()), ends
        # The second is what the kernel says of a packet that meets the rule while it is sent.
        assert any("timed out" in said or "Invalid argument" in said for said in ends.values()), ends
