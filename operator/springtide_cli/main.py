"""The `springtide` command. Sub-commands are imported when they are used, so that `--help` is quick."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from springtide_cli.completing import COMPLETE, Shell, enable, job_names

app = typer.Typer(
    name="springtide",
    help="Elastic PyTorch training on Kubernetes: jobs that grow, shrink and survive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Kubeconfig = Annotated[str | None, typer.Option(help="Kubeconfig file; default: as kubectl.", metavar="PATH")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's.")]
Logs = Annotated[bool, typer.Option("--logs", help="Show the workers' logs too.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines, also on a terminal.")]


def version() -> str:
    try:
        return metadata.version("springtide")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"springtide {version()}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


Name = Annotated[str, typer.Argument(help="Name of a TrainingJob.", autocompletion=job_names)]


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print what makes a shell complete `springtide`: commands, options, and names of jobs in the cluster.

    bash, zsh: source <(springtide completion bash). fish: springtide completion fish | source.
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="springtide", complete_var=COMPLETE, shell=shell.value))


@app.command()
def run(
    manifest: Annotated[str, typer.Argument(help="A YAML file with one TrainingJob; - for standard input.")],
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    logs: Logs = False,
    plain: Plain = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run on an embedded cluster on this machine (Linux).")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --local: leave the cluster running also after a success.")
    ] = False,
    force_conflicts: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that others manage.")
    ] = False,
    template: Annotated[
        str,
        typer.Option(
            help="A ClusterTrainingTemplate, or TrainingTemplate/NAME: what the manifest leaves out.",
            metavar="NAME",
        ),
    ] = "",
    standby: Annotated[
        int | None, typer.Option(min=0, help="So many pods stand by, in place of the manifest's number.")
    ] = None,
) -> None:
    """Apply a manifest, follow its job live, and exit as the job ends.

    Exit codes: 0 succeeded, 1 failed, 2 refused (nothing runs), 130 interrupted (the job stays).
    """
    if local and (kubeconfig or context):
        raise typer.BadParameter("--local brings its own cluster: leave out --kubeconfig and --context")
    if keep and not local:
        raise typer.BadParameter("--keep goes with --local")
    from springtide_cli import run as command
    from springtide_cli.manifest import Changes

    options = command.Options(kubeconfig, context, namespace, logs, plain, force_conflicts, local, keep)
    changes = Changes(template, standby)
    raise typer.Exit(command.run(manifest, options, _console(), changes))


@app.command()
def follow(
    name: Name,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    logs: Logs = False,
    plain: Plain = False,
    local: Annotated[bool, typer.Option("--local", help="On this machine's embedded cluster.")] = False,
) -> None:
    """Follow a job that is there already. Exit codes as for run."""
    if local and (kubeconfig or context):
        raise typer.BadParameter("--local brings its own cluster: leave out --kubeconfig and --context")
    from springtide_cli import run as command

    options = command.Options(kubeconfig, context, namespace, logs, plain, local=local)
    raise typer.Exit(command.follow(name, options, _console()))


@app.command()
def audit(
    name: Name,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of one pass, in jobs of one loop: checks totals too."),
    ] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    local: Annotated[bool, typer.Option("--local", help="On this machine's embedded cluster.")] = False,
) -> None:
    """Say what a job proves about its samples: each counted exactly once per pass, or not.

    Exit codes: 0 proved, 1 disproved, 2 nothing to prove yet, or no such job.
    """
    if local and (kubeconfig or context):
        raise typer.BadParameter("--local brings its own cluster: leave out --kubeconfig and --context")
    from springtide_cli import audit as command
    from springtide_cli.run import Options

    options = Options(kubeconfig, context, namespace, plain=True, local=local)
    raise typer.Exit(command.run(name, samples, options, _console()))


@app.command()
def top(
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Default: all namespaces.")
    ] = None,
    plain: Plain = False,
    local: Annotated[bool, typer.Option("--local", help="On this machine's embedded cluster.")] = False,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Show all jobs live: workers, servers, step time, samples/s, generations, events. Ctrl-C ends it."""
    if local and (kubeconfig or context):
        raise typer.BadParameter("--local brings its own cluster: leave out --kubeconfig and --context")
    from springtide_cli import run as command

    options = command.Options(kubeconfig, context, namespace, plain=plain, local=local)
    raise typer.Exit(command.top(options, _console(), seconds=seconds, once=once))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    add_help_option=False,
)
def local(context: typer.Context) -> None:
    """The embedded one-machine cluster: start, status, stop, node, image."""
    try:
        from springtide_local.cli import app as cluster
    except ModuleNotFoundError as error:
        typer.echo(
            f"springtide local needs the extra [local]: {error}. pip install 'springtide[local]'", err=True
        )
        raise typer.Exit(2) from error
    cluster(args=context.args, prog_name=context.command_path)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    add_help_option=False,
)
def launch(context: typer.Context) -> None:
    """Run a training script in one or several processes of this pod: restarts, signals, outcome, metrics."""
    from springtide.launch.main import main as launcher

    raise typer.Exit(launcher(context.args))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    add_help_option=False,
)
def checkpoint(context: typer.Context) -> None:
    """Checkpoints on storage: list, verify, export."""
    from springtide_cli.checkpoints import app as checkpoints

    checkpoints(args=context.args, prog_name=context.command_path)


def _console() -> Any:
    from rich.console import Console

    return Console()


def main(program: str = "springtide") -> None:
    """Run the command line; exits the process.

    Args:
        program: what it is called in usage lines.
    """
    if sys.argv[1:2] == ["launch"]:
        # Untouched: what follows -- is another program's.
        from springtide.launch.main import main as launcher

        sys.exit(launcher(sys.argv[2:]))
    enable()
    app(prog_name=program, complete_var=COMPLETE)


if __name__ == "__main__":
    main()
