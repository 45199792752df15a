"""Completion in shells and for `kubectl springtide`: commands, options, and names of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
from enum import Enum

import typer

COMPLETE = "_SPRINGTIDE_COMPLETE"
"""The variable by which a shell's script asks for completions."""
SECONDS = 2.0
"""Time that the cluster has to list its jobs: nobody waits longer for a name."""

_NO_FILES = ":4"  # what cobra, kubectl's library, calls ShellCompDirectiveNoFileComp


class Shell(Enum):
    """The shells that there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def enable() -> None:
    """Have typer know the shells where one of them asks; else it need not look for them."""
    if COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the cluster's jobs that begin so; none where it cannot be asked in two seconds.

    Args:
        ctx: with the options that were given so far: --kubeconfig, --context, --namespace, --local.
        incomplete: what the name begins with.
    """
    given = {key: ctx.params.get(key) for key in ("kubeconfig", "context", "namespace", "local")}
    try:
        # What is written here would stand in the middle of the user's line.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            names = asyncio.run(asyncio.wait_for(_names(given), SECONDS))
    except (Exception, SystemExit):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


async def _names(given: dict[str, str | bool | None]) -> list[str]:
    from springtide_cli.apply import JOBS
    from springtide_cli.run import Options, on_cluster

    kubeconfig, context, namespace = (
        None if given[key] is None else str(given[key]) for key in ("kubeconfig", "context", "namespace")
    )
    async with on_cluster(Options(kubeconfig, context, namespace, local=bool(given["local"]))) as kube:
        path = f"{JOBS}/namespaces/{namespace or kube.namespace}/trainingjobs"
        return [str(job["metadata"]["name"]) for job in (await kube.request("GET", path))["items"]]


def for_kubectl(app: typer.Typer, words: list[str]) -> str:
    """Return what `kubectl_complete-springtide` prints: one completion a line, and what to do with them.

    Args:
        app: the command line.
        words: what follows on `kubectl springtide`; the last one is to be completed, and may be empty.
    """
    words = words or [""]
    asked = {
        COMPLETE: "complete_bash",
        "COMP_WORDS": shlex.join(["springtide", *words]),
        "COMP_CWORD": str(len(words)),
    }
    before = {key: os.environ.get(key) for key in asked}
    os.environ.update(asked)
    found = io.StringIO()
    try:
        enable()
        with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
            app(prog_name="springtide", complete_var=COMPLETE)
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
    lines = [line for line in found.getvalue().splitlines() if line]
    return "\n".join([*lines, _NO_FILES]) + "\n"
