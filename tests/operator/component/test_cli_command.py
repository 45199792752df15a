"""The command as a process: exit codes, where messages go, signals."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from cli_fake_api import TOKEN, FakeApi

JOB = "apiVersion: springtide.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\nspec: {}\n"


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serve() as served:
        yield served


class Command:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self) -> tuple[int, str, str]:
        async with asyncio.timeout(120):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def start(*arguments: str, home: Path, kubeconfig: Path | None = None) -> Command:
    environment = {key: value for key, value in os.environ.items() if key not in ("KUBECONFIG", "HOME")}
    environment |= {"HOME": str(home), "COLUMNS": "200"}
    if kubeconfig:
        environment["KUBECONFIG"] = str(kubeconfig)
    return Command(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "springtide_cli.main", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=Path(__file__).parents[3] / "operator",
        )
    )


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(JOB)
    return str(tmp_path / "job.yaml")


async def watched(api: FakeApi) -> None:
    async with asyncio.timeout(120):
        await api.watched.wait()


@pytest.mark.slow
async def test_a_job_that_succeeds_is_0_and_a_job_that_fails_is_1(
    api: FakeApi, manifest: str, tmp_path: Path
) -> None:
    config = api.kubeconfig(tmp_path, namespace="ml")
    command = await start("run", manifest, home=tmp_path, kubeconfig=config)
    await watched(api)
    api.finish("Succeeded", "all done")
    code, out, err = await command.end()
    assert (code, err) == (0, "")
    lines = [line[10:] for line in out.splitlines()]
    assert lines == [
        "TrainingJob digits created",
        "Succeeded: all done",
        "step 7",
        "digits succeeded after 7 steps",
    ]
    assert api.job is not None
    assert api.job["metadata"]["namespace"] == "ml"
    assert api.seen_tokens == {f"Bearer {TOKEN}"}

    api.finish("Failed", "ValueError: bad (train.py:31 in main)")
    code, out, err = await (
        await start("follow", "digits", "-n", "ml", home=tmp_path, kubeconfig=config)
    ).end()
    assert (code, err) == (1, "")
    assert out.splitlines()[-1][10:] == "digits failed: ValueError: bad (train.py:31 in main)"


async def test_a_refused_job_is_2_with_the_servers_message(
    api: FakeApi, manifest: str, tmp_path: Path
) -> None:
    message = 'TrainingJob.springtide.dev "digits" is invalid: spec.workers: Required value'
    api.refuse = {"kind": "Status", "code": 422, "reason": "Invalid", "message": message}
    code, out, err = await (
        await start("run", manifest, home=tmp_path, kubeconfig=api.kubeconfig(tmp_path))
    ).end()
    assert (code, out) == (2, "")
    assert err == f"springtide: TrainingJob digits was refused: {message}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupt_leaves_the_job_and_says_how_to_go_on(
    api: FakeApi, manifest: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = await start("run", manifest, home=tmp_path, kubeconfig=api.kubeconfig(tmp_path))
    await watched(api)
    command.process.send_signal(number)
    found, out, err = await command.end()
    assert (found, err) == (code, "")
    assert out.splitlines()[-3:] == [
        "stopped following; the job digits goes on",
        "follow it again: springtide follow digits -n default",
        "end it: kubectl delete trainingjobs.springtide.dev digits -n default",
    ]


@pytest.mark.slow
async def test_without_a_cluster_there_is_one_clear_message(manifest: str, tmp_path: Path) -> None:
    code, out, err = await (await start("run", manifest, home=tmp_path)).end()
    assert (code, out) == (2, "")
    assert err.startswith(f"springtide: no kubeconfig: {tmp_path}/.kube/config not found. Set KUBECONFIG or")
    assert err.count("\n") == 1

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        api = FakeApi()
        api.port = closed.getsockname()[1]
        config = api.kubeconfig(tmp_path)
        code, out, err = await (await start("run", manifest, home=tmp_path, kubeconfig=config)).end()
    where = f"http://127.0.0.1:{api.port}"
    assert (code, out) == (2, "")
    assert err == f"springtide: the API server at {where} does not answer: Connection refused\n"


@pytest.mark.slow
async def test_a_kubeconfig_that_cannot_be_used(manifest: str, tmp_path: Path) -> None:
    config = FakeApi().kubeconfig(tmp_path)
    code, _, err = await (
        await start("run", manifest, "--context", "nope", home=tmp_path, kubeconfig=config)
    ).end()
    assert (code, err) == (2, f"springtide: {config}: there is no context 'nope', only: x\n")
    config.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config"}))
    code, _, err = await (await start("run", manifest, home=tmp_path, kubeconfig=config)).end()
    assert code == 2
    assert err.startswith(f"springtide: {config}: no usable kubeconfig: ")
    assert err.count("\n") == 1


async def test_a_malformed_manifest_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: b: c")
    code, out, err = await (await start("run", str(path), home=tmp_path)).end()
    assert (code, out) == (2, "")
    assert (
        err
        == f"springtide: {path}: malformed YAML in line 1, column 5: mapping values are not allowed here\n"
    )
