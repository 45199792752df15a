"""Become `unshare` that runs the worker's script as process 1 of a PID namespace. argv: as that script's."""

import os
import sys
from pathlib import Path

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

if __name__ == "__main__":
    script = str(Path(__file__).with_name("worker_script.py"))
    os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, script, *sys.argv[1:]])
