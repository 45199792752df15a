"""Words that were replaced by the field's own (docs/glossary.md) do not come back as names."""

from __future__ import annotations

import ast
from pathlib import Path

from structure import read_modules

ROOT = Path(__file__).resolve().parents[3]

# The name of a class, and what it is called now.
CLASSES = {
    "Acknowledged": "ReplicationAcks",
    "Asynchronous": "AsyncHandler",
    "Borrowed": "LockedShard",
    "CopyingShards": "ShardStore",
    "CountedShards": "ShardStore",
    "Cut": "Snapshot",
    "Cuts": "SnapshotKeeper",
    "Desk": "KvHandler",
    "EarlyShards": "ShardStore",
    "Foresight": "ExpectedStep",
    "FrozenShards": "ShardStore",
    "GatheredRows": "RowGather",
    "Held": "Shard",
    "Kept": "CopyOnWriteBlock",
    "LentShards": "ShardStore",
    "Lost": "FailedShards",
    "Offers": "GradientStash",
    "Pulse": "Keepalive",
    "Readings": "SnapshotReader",
    "Selected": "SparseGradient",
    "Shards": "ShardStore",
    "Steps": "SyncHandler",
}
ROOTS = ("ps",)  # where these words meant something of ours
EVERYWHERE = {
    "AsynchronousExchange": "AsyncBackend",
    "BookLeader": "GenerationLeader",
    "EarlyExchange": "SyncBackend with a SpeculativePull",
    "GroupedExchange": "GroupRoute",
    "Handover": "StateTransfer",
    "Leading": "GenerationLeader",
    "Leasing": "RangeLoop",
    "Links": "Connections",
    "Ring": "CommitLog",
    "ServerExchange": "SyncBackend",
    "Setbacks": "StepFailures",
    "StepHome": "ParameterBackend",
    "SwitchingExchange": "PsBackend",
    "WithinExchange": "SyncBackend with IntermediateValues",
}
MODULES = {
    "acknowledged",
    "copying",
    "counted_shards",
    "desk",
    "early_shards",
    "frozen",
    "frozen_shards",
    "gathered",
    "held",
    "lent",
    "lost",
    "offers",
    "outgoing",
    "pulses",
    "readings",
    "selected",
    "shards",
}


def test_replaced_words_name_no_class_and_no_module() -> None:
    found = []
    for module in read_modules(ROOT, ROOTS):
        if module.path.stem in MODULES:
            found.append(f"{module.path}: see docs/glossary.md")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                found.append(f"{module.path}:{node.lineno}: {node.name} is {CLASSES[node.name]}")
    assert found == []


def test_replaced_words_of_the_worker_name_no_class() -> None:
    found = [
        f"{module.path}:{node.lineno}: {node.name} is {EVERYWHERE[node.name]}"
        for module in read_modules(ROOT)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name in EVERYWHERE
    ]
    assert found == []
