"""The launcher stays small beside what it runs."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import springtide.launch

ROOT = Path(__file__).parents[3]


def test_no_part_of_the_launcher_imports_torch() -> None:
    names = [
        module.name
        for module in pkgutil.iter_modules(springtide.launch.__path__, "springtide.launch.")
        if not module.name.endswith("__main__")
    ]
    assert "springtide.launch.script_launcher" in names
    code = f"import sys, {', '.join(names)}; print(*({{'torch', 'numpy'}} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "worker"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
