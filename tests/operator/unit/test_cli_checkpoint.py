"""`springtide checkpoint list|verify|export` on a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner
from worker_alone import library

import springtide
from springtide.checkpoint import names
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.shares import Share
from springtide.checkpoint.writer import Written
from springtide_cli import checkpoints, main
from springtide_protocol.names import GenerationName, StateName

runner = CliRunner()
FOLDER = "default-digits-12345678"


def state(step: int) -> StateName:
    return StateName(GenerationName.of(1, 0, 1), step)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


@pytest.fixture
def folder(tmp_path: Path, model: torch.nn.Module) -> Path:
    """Two whole checkpoints, and one that was never completed."""
    told: list[Written] = []
    member = Checkpoints(CheckpointLocation(str(tmp_path), FOLDER), {}, lambda _: None, told.append)
    tree: dict[str, Any] = {
        "parameters": {name: item.detach() for name, item in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }
    for step in (20, 40):
        member.take(state(step), lambda: tree, Share(0, ("w0",)), "interval")
        assert member.flush(30)
    member.close()
    assert [one.error for one in told] == ["", ""]
    (tmp_path / FOLDER / names.folder(state(60))).mkdir()
    return tmp_path / FOLDER


def ask(*arguments: object) -> tuple[int, str]:
    result = runner.invoke(checkpoints.app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_list(folder: Path) -> None:
    code, text = ask("list", folder)
    assert code == 0
    lines = text.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [names.folder(state(step)) for step in (60, 40, 20)]
    assert "never completed" in lines[0]
    assert lines[1].split()[1] == "40"
    assert lines[1].endswith("interval")
    assert len(ask("list", folder / names.folder(state(20)))[1].splitlines()) == 2


def test_verify(folder: Path) -> None:
    whole = names.folder(state(40))
    assert ask("verify", folder / whole) == (0, f"{whole}: whole\n")
    share = next((folder / names.folder(state(20))).glob("*.safetensors"))
    share.write_bytes(share.read_bytes()[:-1])
    code, text = ask("verify", folder)
    assert code == 1
    assert [line.partition(": ")[2].split()[-1] for line in text.splitlines()] == [
        "completed",
        "whole",
        "short",
    ]


def test_export_gives_what_load_state_dict_takes(
    folder: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    code, text = ask("export", folder, file)
    assert (code, "(step 40)" in text) == (0, True)
    loaded = safetensors.torch.load_file(file)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(loaded)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert ask("export", folder, file)[0] == 2  # nothing is overwritten
    assert list(tmp_path.glob("*.new")) == []


def test_export_tells_which_damaged_one_it_passed_over(folder: Path, tmp_path: Path) -> None:
    share = next((folder / names.folder(state(40))).glob("*.safetensors"))
    share.write_bytes(share.read_bytes()[:-1])
    code, text = ask("export", folder, tmp_path / "model.safetensors")
    assert (code, "(step 20)" in text) == (0, True)
    assert f"passed over: {names.folder(state(40))}: " in text
    assert ask("export", folder, tmp_path / "none" / "model.safetensors")[0] == 2


class Tied(torch.nn.Module):
    """One tensor under two names, a whole module under two, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 4)
        self.first = self.again = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.tokens.weight
        self.register_buffer("places", torch.arange(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.again(self.first(self.tokens(ids))))
        return out


def test_export_of_a_model_whose_state_dict_has_other_names(tmp_path: Path) -> None:
    with library() as runtime:
        torch.manual_seed(1)
        model = Tied()
        optimizer = torch.optim.Adam(model.parameters())
        springtide.distribute(model, optimizer)
        for (ids,) in springtide.batches((torch.arange(12) % 7,), batch_size=6):
            with springtide.step():
                model(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert runtime.trainer is not None
        tree = runtime.trainer.checkpoint_tree(runtime.position, {})
        member = Checkpoints(CheckpointLocation(str(tmp_path), FOLDER), {}, lambda _: None, lambda _: None)
        member.take(state(2), lambda: tree, Share(0, ("w0",)), "end")
        assert member.flush(60)
        member.close()
    file = tmp_path / "model.safetensors"
    assert ask("export", tmp_path / FOLDER, file)[0] == 0
    other = Tied()
    other.load_state_dict(safetensors.torch.load_file(file))
    assert other.head.weight is other.tokens.weight
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_export_passes_a_damaged_one_over(folder: Path, tmp_path: Path) -> None:
    share = next((folder / names.folder(state(40))).glob("*.safetensors"))
    share.unlink()
    assert "(step 20)" in ask("export", folder, tmp_path / "a")[1]
    code, text = ask("export", folder / names.folder(state(40)), tmp_path / "b")
    assert (code, "is missing" in text) == (1, True)


def test_what_is_not_there_is_one_message(tmp_path: Path) -> None:
    for command in (["list"], ["verify"]):
        code, text = ask(*command, tmp_path)
        assert (code, "there is no checkpoint at" in text) == (2, True)
    code, text = ask("list", tmp_path / "none")
    assert (code, "is the volume mounted?" in text or "error: " in text) == (2, True)


def test_it_is_a_command_of_springtide(folder: Path) -> None:
    result = runner.invoke(main.app, ["checkpoint", "verify", str(folder / names.folder(state(20)))])
    assert "whole" in result.output
