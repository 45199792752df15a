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
    "Awaited": "LazyParameter",
    "Board": "MetricsProxy",
    "Body": "StepContext",
    "Book": "AppliedBatches",
    "Crew": "ScriptLauncher",
    "Crowding": "UnschedulablePods",
    "Cut": "EndStream, or Snapshot",
    "Deal": "StepAssignment",
    "PutAway": "SavedOnSuspend",
    "RangeLoop": "AsyncLoop",
    "RangeSet": "IntervalSet",
    "Recipe": "StepSpec",
    "Rounds": "StepProtocol",
    "Seat": "ScriptMember",
    "Strangers": "UndeclaredOptimizers",
    "Surroundings": "ProcessEnv",
    "Turns": "PrioritySemaphore",
    "Word": "CoordinatorUpdate",
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

MODULES_EVERYWHERE = {
    "body": "context",
    "counted": "scheduler_count",
    "crowding": "unschedulable_pods",
    "declared": "validation",
    "effects_once": "send_once",
    "exchange": "comm",
    "greeting": "hello",
    "halt": "suspension",
    "handover": "state_transfer",
    "leasing": "async_loop",
    "pace": "intervals",
    "pending": "lazy_values",
    "place": "location",
    "putaway": "save_on_suspend",
    "range_loop": "async_loop",
    "rehearsal": "warm_up",
    "relay": "coordinator_sync",
    "several": "multi_step",
    "strangers": "undeclared",
    "takeover": "warm_takeover",
    "turns": "priority_semaphore",
    "undo": "rollback",
    "voiding": "lost_state",
}
FUNCTIONS = {
    "informed": "with_queue_state and its like: with_...",
    "judged": "with_node_health and its like: with_...",
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


def test_replaced_words_name_no_module_and_no_function() -> None:
    modules = read_modules(ROOT)
    found = [
        f"{module.path}: {name} is {MODULES_EVERYWHERE[name]}"
        for module in modules
        for name in module.name.split(".")
        if name in MODULES_EVERYWHERE
    ]
    found += [
        f"{module.path}:{node.lineno}: {node.name} is {FUNCTIONS[node.name]}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
    ]
    assert found == []
