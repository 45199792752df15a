"""Damaged checkpoints: the newest one that is whole comes back, whatever lies beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import fuzzing
from checkpoint_members import FOLDER, Members, equal, state, tree

from springtide.checkpoint import names, restore
from springtide.checkpoint.manifest import CorruptError, parse
from springtide.checkpoint.storage import Storage
from springtide.errors import SpringtideError

Damage = tuple[str, bytes]


def test_damaged_checkpoints_are_never_believed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    members = Members(tmp_path / "whole", 2)
    for step in (5, 6):
        members.save(state(step), tree())
    members.close()
    folder = tmp_path / "whole" / FOLDER / names.folder(state(6))
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def made(chance: Random) -> Damage:
        name = chance.choice(sorted(whole))
        if name.endswith(".json") and chance.random() < 0.6:
            changed = fuzzing.mutated(chance, json.loads(whole[name]))
            return name, json.dumps(changed).encode()
        return name, fuzzing.damaged(chance, whole[name])

    def check(damage: Damage) -> None:
        name, data = damage
        (folder / name).write_bytes(data)
        try:
            try:
                found, skipped = restore.newest(Storage(str(tmp_path / "whole"), FOLDER))
            except SpringtideError:  # it says that a later release wrote it: nobody guesses
                assert json.loads(data)["version"] > 1
                return
            assert found is not None
            assert equal(found.tree, tree())
            assert found.manifest.state in (state(5), state(6))
            assert found.manifest.state == state(6) or skipped
        finally:
            (folder / name).write_bytes(whole[name])

    deep = b'{"format":' + b"[" * 5000
    seeds: list[Damage] = [
        (names.MANIFEST, b""),
        (names.MANIFEST, deep),
        (names.MANIFEST, b"9" * 5000),
        (names.MANIFEST, whole[names.MANIFEST].replace(b'"bytes": ', b'"bytes": 9999999999999')),
        (names.MANIFEST, whole[names.MANIFEST].replace(b".safetensors", b"/../../x")),
        (names.MANIFEST, b"\xff\xfe"),
    ]
    assert fuzzing.run("believed", seeds, made, check, 250) >= len(seeds)
    shutil.rmtree(tmp_path / "whole")


def test_any_json_is_a_manifest_or_corrupt() -> None:
    file = {"path": "a", "bytes": 1, "sha256": "0" * 64}
    value = {
        "format": "springtide-checkpoint",
        "version": 1,
        "state": {"incarnation": 1, "restart": 0, "number": 1, "step": 6},
        "job": {"name": "a"},
        "written": 1.0,
        "reason": "interval",
        "parts": {"workers": {"header": file, "files": [file]}},
    }

    def check(changed: object) -> None:
        try:
            parse(json.dumps(changed).encode(), "step")
        except CorruptError:
            return
        raise AssertionError("it is no manifest of that folder")

    def made(chance: Random) -> object:
        return fuzzing.mutated(chance, value, 4)

    assert fuzzing.run("corrupt", [value], made, check, 1500) >= 1
