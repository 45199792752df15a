"""The init process before a worker's command: who hears SIGTERM, and how it ends. Real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from first_process import UNSHARE
from operator_world import job_object

from springtide_local.strays import INIT_MARK, children_of, program_of
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.init_process import MARK, text, with_init
from springtide_operator.manifests.worker import worker_pod

Object = dict[str, Any]

SOON = 20.0  # seconds, of which a quiet machine needs a tenth of one
# A signal may come while "up" is still being flushed, where another print would be refused.
POLITE = """
import os, signal, sys
def leave(*_):
    os.write(1, b"leaves\\n")
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    signal.pause()
"""
DEAF = "import time; print('up', flush=True); time.sleep(600)"


def command(*words: str, left: float | None = None) -> list[str]:
    """Return the command line of the pod: the init program, and the command that it runs."""
    container: Object = {"command": list(words)}
    with_init(container, {})
    if left is None:
        return container["command"]
    return [word.replace("LEFT_SECONDS = 5.0", f"LEFT_SECONDS = {left}") for word in container["command"]]


SHELL_POLITE = command("sh", "-c", 'cd / && python -c "$0"; exit $?', POLITE)


@contextlib.contextmanager
def running(argv: list[str], up: bool = True, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start it, and wait until what it runs says so."""
    env = {**os.environ, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, text=True, env=env, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            if up:
                assert process.stdout.readline() == "up\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(what: str, attempt: Any) -> None:
    deadline = time.monotonic() + SOON
    while not attempt():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_program_behind_a_shell_hears_sigterm_and_leaves() -> None:
    """The shell waits for it, passes nothing on, and ends with its code."""
    with running(SHELL_POLITE) as process:
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\n"
        assert process.returncode == 5


@pytest.mark.parametrize("argv", [["python", "-c", DEAF], ["sh", "-c", 'python -c "$0"; echo over', DEAF]])
def test_where_nobody_catches_it_all_get_sigterm(argv: list[str]) -> None:
    with running(command(*argv)) as process:
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == ""
        assert process.returncode == 143


def test_lines_after_the_program_that_left_have_their_seconds() -> None:
    """Long enough to copy a result, and not for ever."""
    script = 'python -c "$0"; sleep 0.3; echo copied; sleep 600'
    with running(command("sh", "-c", script, POLITE, left=1.5)) as process:
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\ncopied\n"
        assert process.returncode == 143


def test_program_that_comes_to_catch_it_later_is_told_too() -> None:
    """Beside one that takes its time: whoever begins meanwhile shall leave as well."""
    slow = "import signal, time; signal.signal(15, lambda *_: None); print('up', flush=True); time.sleep(2)"
    script = 'python -c "$1" & sleep 0.5; exec python -c "$0"'
    with running(command("sh", "-c", script, POLITE, slow)) as process:
        process.terminate()
        assert "leaves" in process.communicate(timeout=SOON)[0]
        assert process.returncode == 5


def test_children_of_a_catching_program_are_its_own_to_end() -> None:
    parent = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {DEAF!r}])\n"
    report = "    print(child.poll(), flush=True)\n    child.kill()\n    sys.exit(5)"
    script = parent + POLITE.replace("    sys.exit(5)", report).replace('print("up", flush=True)', "")
    with running(command("python", "-c", script)) as process:
        until("a handler", lambda: _catches(program_of(process.pid)))
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\nNone\n"
        assert process.returncode == 5


def _catches(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> 14 & 1)


def test_other_signals_reach_only_who_catches_them() -> None:
    """Send signals that the command does not catch, which the kernel delivers to process 1 no more either."""
    script = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'told\\n'))\n" + POLITE
    with running(command("sh", "-c", 'python -c "$0"; exit $?', script)) as process:
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\n"
        assert process.returncode == 5


def test_where_the_kernel_tells_no_masks_all_but_shells_are_told() -> None:
    """Run where /proc/PID/status has no signal masks, which is so in gVisor."""
    blind = [
        word.replace('"SigCgt", "SigBlk"', "").replace("'SigCgt', 'SigBlk'", "") for word in SHELL_POLITE
    ]
    assert blind != SHELL_POLITE
    with running(blind) as process:
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\n"
        assert process.returncode == 5


def test_without_proc_the_command_itself_is_told() -> None:
    argv = [word.replace("'/proc'", "'/nowhere'") for word in command("python", "-c", POLITE)]
    with running(argv) as process:
        process.terminate()
        assert process.communicate(timeout=SOON)[0] == "leaves\n"
        assert process.returncode == 5


@pytest.mark.parametrize(
    ("script", "code"), [("raise SystemExit(7)", 7), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_ends_as_its_command_ends(script: str, code: int) -> None:
    assert subprocess.run(command("python", "-c", script), check=False).returncode == code


def test_command_inherits_no_signals_of_the_init_process() -> None:
    """Let the command inherit neither the signals that Python ignores nor those that are blocked while
    signals are waited for. (Of the first 28: glibc has whatever it spawns ignore two of its own, which its
    threads install again.)
    """
    shown = "grep -E '^Sig(Blk|Ign)' /proc/self/status | grep -o '.......$'"
    direct = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    behind = subprocess.run(command("sh", "-c", shown), capture_output=True, text=True, check=True)
    assert behind.stdout == direct.stdout


def test_command_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    found = subprocess.run(command("no-such-program", "x"), capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (
        127,
        "cannot start the command 'no-such-program': No such file or directory\n",
    )
    (tmp_path / "text").write_text("no program")
    found = subprocess.run(command(str(tmp_path / "text")), capture_output=True, text=True, check=False)
    assert found.returncode == 126
    assert "Permission denied" in found.stderr


def test_image_without_python_runs_the_command_as_it_is(tmp_path: Path) -> None:
    for name in ("sh", "echo"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    argv = command("sh", "-c", "echo it runs, without one; kill -9 $$", "x")
    found = subprocess.run(argv, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert (found.stdout, found.returncode) == ("it runs, without one\n", -9)


def test_files_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("signal", "time", "os"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""}
    assert subprocess.run(command("true"), cwd=tmp_path, env=env, check=False).returncode == 0


def test_orphans_are_reaped_in_a_pid_namespace() -> None:
    """Reap orphans where the init process is process 1 indeed, and the kernel gives them to it."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    orphan = "(sleep 0.2 &); sleep 1; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '"
    found = subprocess.run(
        [*UNSHARE, *command("sh", "-c", orphan)], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "0", found
    argv = [*UNSHARE, *command("sh", "-c", 'python -c "$0"; echo over', DEAF)]
    with running(argv) as process:
        (first,) = children_of(process.pid)
        os.kill(first, signal.SIGTERM)
        assert process.communicate(timeout=SOON)[0] == ""
        assert process.returncode == 143


def container_of(**template: Any) -> Object:
    """The main container of a worker's pod, made from a template."""
    raw = job_object()
    spec = raw["spec"]["workers"]["template"]["spec"]
    spec["containers"][0] |= template.pop("container", {})
    raw["spec"]["workers"]["template"] |= template
    return worker_pod(Job.parse(raw), 0, 0, "10.0.0.1:7070")["spec"]["containers"][0]


@pytest.mark.parametrize("python", ["python", "python3", "/opt/conda/bin/python3.11"])
def test_templates_own_python_runs_it(python: str) -> None:
    made = container_of(container={"command": [python, "train.py"], "args": ["--epochs", "$(EPOCHS)"]})
    assert made["command"] == [python, "-I", "-S", "-c", text(), python, "train.py"]
    assert made["args"] == ["--epochs", "$(EPOCHS)"]


@pytest.mark.parametrize(
    ("program", "shell"), [("/bin/bash", "/bin/bash"), ("sh", "sh"), ("torchrun", "sh"), ("pythonic", "sh")]
)
def test_other_commands_look_for_python(program: str, shell: str) -> None:
    made = container_of(container={"command": [program, "x"]})["command"]
    assert (made[:2], made[3:]) == ([shell, "-c"], [text(), program, "x"])


def test_no_command_keeps_the_images_entry_point() -> None:
    made = container_of(container={"command": [], "args": ["x"]})
    assert not made["command"]
    assert made["args"] == ["x"]


def test_annotation_none_leaves_the_command_alone() -> None:
    command = ["python", "x.py"]
    off = {"annotations": {names.ANNOTATION_INIT: "none"}}
    assert container_of(container={"command": command}, metadata=off)["command"] == command
    wrong = {"annotations": {names.ANNOTATION_INIT: "no"}}
    with pytest.raises(TemplateError, match=r"springtide.dev/init is 'no': say 'none', or leave it out"):
        container_of(container={"command": command}, metadata=wrong)


def test_text_is_small_and_nothing_in_it_is_expanded() -> None:
    """Kubernetes expands `$(NAME)` in a command, and takes `$$` for `$`."""
    for word in command("sh", "x")[:4]:
        assert "$(" not in word
        assert "$$" not in word
    assert len(text()) < 4096
    assert text().startswith(MARK)
    assert MARK.encode().startswith(INIT_MARK)
    compile(text(), "init", "exec")
    assert sys.version_info >= (3, 11)
