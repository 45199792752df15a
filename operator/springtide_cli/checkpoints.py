"""`springtide checkpoint`: what is on storage, whether it can be read, and the model out of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from springtide_cli.errors import FAILED, REFUSED

app = typer.Typer(
    name="checkpoint",
    help="Look at checkpoints. URI: a job's folder (status.checkpoint.uri), or one checkpoint in it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Uri = Annotated[
    str, typer.Argument(help="A path, file:// or s3://: a job's folder, or one checkpoint in it.")
]
Answer = TypeVar("Answer")


@app.command("list")
def list_(uri: Uri) -> None:
    """Show the checkpoints, the newest first."""
    typer.echo(f"{'NAME':40} {'STEP':>10} {'MIB':>10} {'WRITTEN (UTC)':20} REASON")
    for entry in _ask(lambda library: library.inspect.entries(uri)):
        manifest = entry.manifest
        if manifest is None:
            typer.echo(f"{entry.name:40} {entry.problem}")
            continue
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.written))
        mebibytes = manifest.size / (1 << 20)
        typer.echo(
            f"{entry.name:40} {manifest.state.step:10} {mebibytes:10.1f} {written:20} {manifest.reason}"
        )


@app.command()
def verify(uri: Uri) -> None:
    """Read every byte and compare checksums. Exit code 1 when one of them is damaged or not complete."""
    damaged = 0
    for entry in _ask(lambda library: library.inspect.verify(uri)):
        damaged += entry.manifest is None
        typer.echo(f"{entry.name}: {entry.problem or 'whole'}")
    if damaged:
        raise typer.Exit(FAILED)


@app.command()
def export(
    uri: Uri, file: Annotated[Path, typer.Argument(help="A new safetensors file on this machine.")]
) -> None:
    """Write the model's parameters and buffers into one plain safetensors file."""
    written = _ask(lambda library: library.consolidate.to_safetensors(uri, file))
    for problem in written.passed_over:
        typer.echo(f"passed over: {problem}", err=True)
    typer.echo(f"{file}: {written}")


def _ask(question: Callable[[Any], Answer]) -> Answer:
    """The library's answer; its errors end the command with one message."""
    try:
        from springtide import checkpoint
        from springtide.checkpoint import consolidate, inspect  # noqa: F401 - the question's
        from springtide.checkpoint.manifest import CorruptError
        from springtide.checkpoint.storage import StorageError
        from springtide.errors import UsageError
    except ModuleNotFoundError as error:
        typer.echo(
            f"springtide checkpoint needs the extra [worker]: {error}. pip install 'springtide[worker]'",
            err=True,
        )
        raise typer.Exit(REFUSED) from error
    try:
        return question(checkpoint)
    except (StorageError, FileExistsError, FileNotFoundError, UsageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    except (CorruptError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from error
