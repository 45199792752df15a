"""Begins the script in a worker's pod: installs packages, unpacks code, and becomes the script.

It travels in the job's ConfigMap and runs with the image's Python, so it uses the standard library alone:
`python boot.py FOLDER WORK`, where FOLDER is the mounted ConfigMap and WORK an empty folder of the pod. The
processes of a pod share both; the first one prepares while the others wait for its lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tarfile
from typing import Any

PLAN = "plan.json"
SCRIPT = "script.py"
ARGUMENTS = "arguments.json"
CODE = "code.tar.gz"


def install(packages: list[str], target: str) -> None:
    """Install what the image lacks of packages into a folder of its own, and change nothing else.

    pip is asked what it would install beside what is there: into a folder alone it would install everything
    again, torch included.

    Args:
        packages: requirements as pip takes them.
        target: path of the folder.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    report = os.path.join(os.path.dirname(target), "packages.json")
    if code := subprocess.call([*pip, "--dry-run", "--report", report, "--", *packages]):
        sys.exit(f"pip cannot install the job's packages ({' '.join(packages)}): it ended with {code}")
    with open(report, encoding="utf-8") as file:
        found = [item["download_info"]["url"] for item in json.load(file)["install"]]
    if found and (code := subprocess.call([*pip, "--no-deps", "--target", target, "--", *found])):
        sys.exit(f"pip cannot install {' '.join(found)}: it ended with {code}")


def prepare(folder: str, work: str, plan: dict[str, Any]) -> None:
    """Install and unpack once for all processes of the pod.

    Args:
        folder: with the files of the job.
        work: empty folder of the pod.
        plan: what PLAN says.
    """
    done = os.path.join(work, "prepared")
    with open(os.path.join(work, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(done):
            return
        if plan["packages"]:
            install(plan["packages"], os.path.join(work, "packages"))
        archive = os.path.join(folder, CODE)
        if os.path.exists(archive):
            with tarfile.open(archive) as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(os.path.join(work, "code"), filter="data")
                else:
                    tar.extractall(os.path.join(work, "code"))
        with open(done, "w", encoding="utf-8"):
            pass


def main(folder: str, work: str) -> None:
    """Prepare the pod, and replace this process by the script's.

    Args:
        folder: with the files of the job.
        work: empty folder of the pod.
    """
    with open(os.path.join(folder, PLAN), encoding="utf-8") as file:
        plan = json.load(file)
    prepare(folder, work, plan)
    code = os.path.join(work, "code")
    paths = [path for path in (code, os.path.join(work, "packages")) if os.path.isdir(path)]
    if os.path.isdir(code):
        os.chdir(code)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, before] if before else paths)
    script = os.path.join(code, plan["script"]) if plan["script"] else os.path.join(folder, SCRIPT)
    arguments = plan["flags"] if plan["flags"] is not None else [os.path.join(folder, ARGUMENTS)]
    os.execv(sys.executable, [sys.executable, script, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
