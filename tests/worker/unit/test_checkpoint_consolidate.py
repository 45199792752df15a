"""Files for plain PyTorch out of checkpoints: what `load_state_dict` and DCP make of them, and errors."""

from __future__ import annotations

import copy
import json
import resource
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_members import FOLDER, Members, state
from page_code import python
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from springtide.checkpoint import consolidate, names
from springtide.checkpoint.manifest import VERSION_WITH_FROZEN
from springtide.checkpoint.shares import Share
from springtide.checkpoint.staging import Collected, Stage
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import UsageError
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State, names_in_state_dict

POSITION = Position(Cursor(1, 2, 3, 4), Ledger(stage=1, epoch=2, expected=10, count=3), 1.5)
Optimizer = torch.optim.Optimizer


class Model(torch.nn.Module):
    """Tied weights, BatchNorm, a bfloat16 layer, one that does not train, a buffer that nobody saves, and
    a parameter without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(70, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.narrow = torch.nn.Linear(8, 8).to(torch.bfloat16)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 70)
        self.head.weight = self.tokens.weight
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("places", torch.arange(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids))
        x = self.frozen(self.narrow(x.to(torch.bfloat16)).float())
        out: torch.Tensor = self.head(x) + self.nothing.sum()
        return out


def adamw(model: torch.nn.Module) -> list[Optimizer]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [torch.optim.AdamW([{"params": decayed, "lr": 0.05}, {"params": others, "weight_decay": 0.0}])]


def two_kinds(model: torch.nn.Module) -> list[Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.optim.SGD(trained[::2], lr=0.1, momentum=0.9),
        torch.optim.Adagrad(trained[1::2], lr=0.1),
    ]


def train(model: torch.nn.Module, optimizers: list[Optimizer], steps: int) -> None:
    for step in range(steps):
        model(torch.arange(40) * (step + 3) % 70).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(
    make: Callable[[torch.nn.Module], list[Optimizer]] = adamw, steps: int = 3
) -> tuple[Model, list[Optimizer], dict[str, Any]]:
    """A model that has trained, and the tree that a checkpoint saves of it."""
    torch.manual_seed(0)
    model = Model()
    optimizers = make(model)
    train(model, optimizers, steps)
    return model, optimizers, copy.deepcopy(tree_of(model, optimizers))


def tree_of(model: Any, optimizers: list[Optimizer]) -> dict[str, Any]:
    named, saved_as = dict(model.named_parameters()), names_in_state_dict(model)
    return State(named, Buffers(model), optimizers, {}, saved_as).read(POSITION, {})


def save(root: Path, content: dict[str, Any], step: int = 5, members: int = 3) -> Path:
    writers = Members(root, members)
    assert writers.save(state(step), content).error == ""
    writers.close()
    return root / FOLDER / names.folder(state(step))


def other_model() -> Model:
    torch.manual_seed(77)
    return Model()


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare what two objects' state dicts hold, bit for bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def read_dcp(folder: Path, found: dict[str, Any], **options: Any) -> None:
    """Load a folder in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, checkpoint_id=folder, **options)


def load_dcp(folder: Path, model: torch.nn.Module, optimizers: list[Optimizer], **options: Any) -> None:
    """Load a folder as docs/checkpoints.md says."""
    of_model, of_optimizers = get_state_dict(model, optimizers)
    read_dcp(folder, {"model": of_model, "optimizer": of_optimizers}, **options)
    set_state_dict(model, optimizers, model_state_dict=of_model, optim_state_dict=of_optimizers)


@pytest.mark.parametrize("members", [1, 7])
def test_safetensors_file_is_taken_by_load_state_dict(tmp_path: Path, members: int) -> None:
    model, _, content = trained()
    save(tmp_path, content, members=members)
    file = tmp_path / "model.safetensors"
    written = consolidate.to_safetensors(str(tmp_path / FOLDER), file)
    other = other_model()
    other.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert_same(model.state_dict(), other.state_dict())
    assert other.head.weight is other.tokens.weight
    assert written.tensors == len(model.state_dict())
    assert written.size == sum(tensor.nbytes for tensor in model.state_dict().values())
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "checkpoint": names.folder(state(5)), "step": "5"}
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_pieces_of_the_page_load_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of docs/checkpoints.md."""
    model, optimizers, content = trained()
    save(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    consolidate.to_safetensors(str(tmp_path / FOLDER), tmp_path / "model.safetensors")
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "gpt.dcp", optimizer=True)
    other = other_model()
    found = {"model": other, "safetensors": safetensors}
    exec(python("docs/checkpoints.md", "load_file"), found)
    assert_same(model.state_dict(), other.state_dict())
    other = other_model()
    (optimizer,) = adamw(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP of one process
        exec(python("docs/checkpoints.md", "dcp.load"), {"model": other, "optimizer": optimizer})
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizers[0].state_dict(), optimizer.state_dict())


def test_dcp_folder_without_optimizer_holds_the_model(tmp_path: Path) -> None:
    model, _, content = trained()
    save(tmp_path, content)
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp")
    other = other_model()
    found = {"model": other.state_dict()}
    read_dcp(tmp_path / "dcp", found)
    other.load_state_dict(found["model"], strict=True)
    assert_same(model.state_dict(), other.state_dict())
    assert [path.name for path in tmp_path.glob("dcp*")] == ["dcp"]


@pytest.mark.parametrize("make", [adamw, two_kinds])
def test_training_goes_on_from_a_dcp_folder(
    tmp_path: Path, make: Callable[[torch.nn.Module], list[Optimizer]]
) -> None:
    model, optimizers, content = trained(make)
    save(tmp_path, content)
    (tmp_path / "dcp").mkdir()  # one that is empty may be there
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp", optimizer=True)
    other = other_model()
    others = make(other)
    for optimizer in others:
        for group in optimizer.param_groups:
            group["lr"] = 9.0  # comes from the checkpoint
    load_dcp(tmp_path / "dcp", other, others)
    for _ in range(2):
        for one, another in zip(optimizers, others, strict=True):
            assert_same(one.state_dict(), another.state_dict())
        assert_same(model.state_dict(), other.state_dict())
        train(model, optimizers, 2)
        train(other, others, 2)


def test_names_in_dcp_are_those_of_the_model_below_compile(tmp_path: Path) -> None:
    model, optimizers, _ = trained()
    save(tmp_path, tree_of(torch.compile(model, backend="eager"), optimizers))
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp", optimizer=True)
    other = other_model()
    others = adamw(other)
    load_dcp(tmp_path / "dcp", other, others)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizers[0].state_dict(), others[0].state_dict())


def test_parameter_without_state_is_loaded_partially(tmp_path: Path) -> None:
    model, optimizers, content = trained()
    content["optimizer"]["state"][0] = {}
    save(tmp_path, content)
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp", optimizer=True)
    other = other_model()
    others = adamw(other)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    load_dcp(tmp_path / "dcp", other, others, planner=planner)
    ours, theirs = optimizers[0].state_dict()["state"], others[0].state_dict()["state"]
    assert_same({n: ours[n] for n in ours if n}, {n: theirs[n] for n in theirs if n})
    assert_same(model.state_dict(), other.state_dict())


def test_numbers_of_numpy_in_groups_keep_their_values(tmp_path: Path) -> None:
    _, _, content = trained()
    content["optimizer"]["groups"][0]["lr"] = np.float64(0.125)
    save(tmp_path, content)
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp", optimizer=True)
    other = other_model()
    others = adamw(other)
    load_dcp(tmp_path / "dcp", other, others)
    assert others[0].param_groups[0]["lr"] == 0.125


class OnServers:
    """The optimizer's state, which servers hold and not the workers."""

    kind = "servers"

    def __init__(self, content: dict[str, Any]) -> None:
        states = content["optimizer"]["state"]
        self._tree = {"optimizer": dict(enumerate(states)), "tables": {}}
        content["optimizer"]["state"] = [{} for _ in states]

    def collect(self, index: int, count: int) -> Collected:
        return Stage().take(self._tree, Share(index, ("w",) * count))

    def close(self) -> None:
        """Do nothing: it holds no memory."""


def test_state_that_servers_held_is_written_with_the_rest(tmp_path: Path) -> None:
    model, optimizers, content = trained()
    servers = OnServers(content)
    writers = Members(tmp_path, 2)
    for index, member in enumerate(writers.all):
        member.take(state(5), lambda: content, Share(index, writers.share), "interval", lambda *_: servers)
    writers.flush()
    writers.close()
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp", optimizer=True)
    other = other_model()
    others = adamw(other)
    load_dcp(tmp_path / "dcp", other, others)
    assert_same(optimizers[0].state_dict(), others[0].state_dict())
    assert_same(model.state_dict(), other.state_dict())


def run(*arguments: object) -> int:
    return consolidate.main([str(argument) for argument in arguments])


def flip_a_bit(folder: Path) -> None:
    share = next(folder.glob("*.safetensors"))
    raw = bytearray(share.read_bytes())
    raw[-3] ^= 4
    share.write_bytes(raw)


@pytest.mark.parametrize("option", ["--to", "--to-dcp"])
def test_damaged_one_is_passed_over_unless_it_is_named(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, trained(steps=1)[2], 5)
    newest = save(tmp_path, trained()[2], 6)
    flip_a_bit(newest)
    target, uri = tmp_path / "out", tmp_path / FOLDER
    for named in ((newest,), (uri, "--name", newest.name)):
        assert run(*named, option, target) == consolidate.FAILED
        assert "has not the checksum that was written" in capsys.readouterr().err
    assert list(tmp_path.glob("out*")) == []
    assert run(uri, option, target) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"passed over: {newest.name}: ")
    assert f"{names.folder(state(5))} (step 5)" in said.out
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_only_damaged_ones_fail_with_each_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [save(tmp_path, trained()[2], step) for step in (5, 6)]
    flip_a_bit(folders[0])
    (folders[1] / "workers.json").unlink()
    assert run(tmp_path / FOLDER, "--to", tmp_path / "out") == consolidate.FAILED
    said = capsys.readouterr().err
    assert f"{folders[1].name}: workers.json is missing; {folders[0].name}: " in said


def test_older_checkpoint_is_not_taken_for_a_newer_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save(tmp_path, trained()[2], step) for step in (5, 6)]
    path = folders[1] / names.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": VERSION_WITH_FROZEN + 1}))
    assert run(tmp_path / FOLDER, "--to", tmp_path / "out") == consolidate.FAILED
    assert f"{folders[1].name}: " in (said := capsys.readouterr().err)
    assert "upgrade springtide" in said
    assert not (tmp_path / "out").exists()


def test_chosen_checkpoint_is_taken_though_there_is_a_newer(tmp_path: Path) -> None:
    model, _, content = trained(steps=1)
    save(tmp_path, content, 5)
    save(tmp_path, trained()[2], 6)
    assert run(tmp_path / FOLDER, "--name", names.folder(state(5)), "--to", tmp_path / "out") == 0
    assert_same(dict(model.state_dict()), safetensors.torch.load_file(tmp_path / "out"))


def test_targets_that_are_there_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, trained()[2])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for option, target in (
        ("--to", "file"),
        ("--to-dcp", "file"),
        ("--to-dcp", "folder"),
        ("--to", "folder"),
    ):
        assert run(tmp_path / FOLDER, option, tmp_path / target) == consolidate.REFUSED
        assert f"{tmp_path / target} is there already" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine").read_text() == "mine"
    assert run(tmp_path / FOLDER, "--to", tmp_path / "none" / "out") == consolidate.REFUSED
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_missing_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, trained()[2])
    (tmp_path / "empty").mkdir()
    for arguments, says in (
        ((tmp_path / "empty",), f"there is no checkpoint at {tmp_path / 'empty'}"),
        ((tmp_path / FOLDER, "--name", names.folder(state(9))), "there is no checkpoint at"),
        ((tmp_path / FOLDER, "--name", "newest"), "'newest' is no name of a checkpoint"),
    ):
        assert run(*arguments, "--to", tmp_path / "out") == consolidate.REFUSED
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--to", "--to-dcp"])
def test_target_without_room_leaves_nothing(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, trained()[2])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        assert run(tmp_path / FOLDER, option, tmp_path / "out") == consolidate.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "bytes it needs: File too large" in capsys.readouterr().err
    assert list(tmp_path.glob("out*")) == []


def test_optimizer_is_refused_for_a_safetensors_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run(tmp_path, "--to", tmp_path / "out", "--optimizer")
    assert refused.value.code == consolidate.REFUSED
    assert "--optimizer needs --to-dcp" in capsys.readouterr().err


def without_members(content: dict[str, Any]) -> None:
    del content["optimizer"]["members"]


def in_two_optimizers(content: dict[str, Any]) -> None:
    [groups] = content["optimizer"]["members"]
    groups[1][0] = groups[0][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_members, "did not save which parameters"),
        (in_two_optimizers, "nothing is in several optimizers"),
    ],
)
def test_optimizer_whose_state_has_no_names_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    _, _, content = trained()
    change(content)
    save(tmp_path, content)
    to_dcp = partial(consolidate.to_dcp, str(tmp_path / FOLDER), tmp_path / "dcp")
    with pytest.raises(UsageError, match=says):
        to_dcp(optimizer=True)
    assert list(tmp_path.glob("dcp*")) == []
    assert to_dcp().tensors == len(Model().state_dict())


def test_dtype_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    _, _, content = trained()
    content["buffers"]["phases"] = torch.zeros(3, dtype=torch.complex128)
    save(tmp_path, content)
    with pytest.raises(UsageError, match=r"phases is torch\.complex128.*write a DCP folder"):
        consolidate.to_safetensors(str(tmp_path / FOLDER), tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []
    consolidate.to_dcp(str(tmp_path / FOLDER), tmp_path / "dcp")
    found = {"model": {"phases": torch.ones(3, dtype=torch.complex128)}}
    read_dcp(tmp_path / "dcp", found)
    assert torch.equal(found["model"]["phases"], content["buffers"]["phases"])
