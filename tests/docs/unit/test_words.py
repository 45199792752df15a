"""Words that were replaced by the field's own (docs/glossary.md) do not come back as names."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from structure import ROOTS as SOURCES
from structure import Module, read_modules

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

PS = ("ps", "worker/springtide/ps")  # where a word of the parameter servers had a meaning of ours
WORKER = ("ps", "worker")
ALL = ("operator", "protocol", "ps", "worker")
# A word, what is said now, and where it had a meaning of ours. In lower case, as whole names of functions,
# attributes, constants and modules; `_word`, `WORD` and `Word` are the same name.
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "acknowledged": ("replication acks", PS),
    "answers": ("ParkReply", ("worker/springtide/coordination",)),
    "blocks": ("retry_blocks", ("worker/springtide/elastic",)),
    "board": ("proxy", ALL),
    "book": ("applied_batches", ALL),
    "books": ("applied_batches, keeps_applied_batches", ALL),
    "borrowed": ("locked", PS),
    "counted": ("has_counts, is_counted", ALL),
    "crew": ("launcher", ALL),
    "crowding": ("unschedulable", ALL),
    "cut": ("split, at_epoch_end, disconnect", ALL),
    "deal": ("assignment, assign", ALL),
    "dealt": ("note_assigned", ALL),
    "declared": ("trainer arguments", ALL),
    "desk": ("lease server, KvHandler", ALL),
    "early": ("speculative", ALL),
    "fetch_early": ("FETCH_INTERMEDIATE", ALL),
    "freeze": ("take_snapshot", ALL),
    "gathered": ("row gather", ALL),
    "greeting": ("hello", ALL),
    "handover": ("state transfer", ALL),
    "halt": ("suspension", ALL),
    "hear": ("take_reports, record_checkpoint", ALL),
    "heard": ("known_members, note_report, decode", ALL),
    "kept": ("copied, reused, contributions, residual", ALL),
    "leading": ("GenerationLeader", ALL),
    "leasing": ("async loop", ALL),
    "lent": ("locked", ALL),
    "lineage": ("run_id", ALL),
    "link": ("connection", ALL),
    "links": ("connections", ALL),
    "make_believe": ("fake device", ALL),
    "offer": ("push_early", ALL),
    "offer_early": ("SPECULATIVE_PUSH", ALL),
    "offering": ("early push", ALL),
    "offers": ("stashed", ALL),
    "pace": ("intervals, send_rate", ALL),
    "parts": ("substeps", PS),
    "passing": ("relay chain", ALL),
    "pulse": ("keepalive", ALL),
    "pulses": ("keepalives", ALL),
    "putaway": ("save_on_suspend", ALL),
    "range": ("batch number, samples", ALL),
    "range_loop": ("async_loop", ALL),
    "ranges": ("intervals, batches", ALL),
    "readings": ("chunk_reads", ALL),
    "recipe": ("step_spec", ALL),
    "recipes": ("step_specs", ALL),
    "rehearsal": ("is_warm_up", ALL),
    "round": ("backward_pass, rendezvous", ALL),
    "rounds": ("step protocol", ALL),
    "seat": ("member", ALL),
    "setbacks": ("step failures", ALL),
    "several": ("multi_step", ALL),
    "side": ("commit_vote", ALL),
    "stage_early": ("STAGE_SPECULATIVE", ALL),
    "stage_selected": ("STAGE_SPARSE", ALL),
    "strangers": ("undeclared", ALL),
    "surroundings": ("process_env", ALL),
    "takeover": ("warm_takeover", ALL),
    "team": ("worker_group", ALL),
    "tell": ("announce", ALL),
    "thaw": ("release", ALL),
    "told": ("announced, reported", ALL),
    "turns": ("semaphore", ALL),
    "undo": ("roll_back", ALL),
    "voiding": ("lost_state", ALL),
    "within": ("intermediate, with_prefix", ALL),
    "word": ("report, make_sync", ALL),
}
# Names that say something else, or that users see, and why they may.
ALLOWED = {
    "operator/springtide_coordinator/evaluation.py: _counted": "the number of samples whose sums have come",
    "worker/springtide/elastic/retry.py: _counted": "the number of calls in the present block",
    "worker/springtide/data/permutation.py: _ROUNDS": "rounds of a Feistel network",
}


# Keys that say something else, and why they may stay; those of frames have names in `wire/keys.py`.
ALLOWED_KEYS = {
    "worker/springtide/integrations/lightning/logged.py: counted": "samples counted; stands in checkpoints",
}


def keys_used(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, key) of the texts by which something is put into a mapping, or asked of one."""
    for node in module.nodes:
        if isinstance(node, ast.Dict):
            found: list[ast.expr | None] = [*node.keys]
        elif isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            found = [node.args[0]] if node.func.attr in ("get", "pop", "set", "with_prefix") else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            found = [node.args[1]] if node.func.id == "number_in" else []
        else:
            continue
        for key in found:
            text = key.values[0] if isinstance(key, ast.JoinedStr) and key.values else key
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value.split("/")[0]


def names_made(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the file itself, and of the functions, classes and attributes that it makes."""
    yield 1, module.path.stem
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets += [statement.target] if isinstance(statement, ast.AnnAssign) else []
                yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))


@functools.cache
def modules(roots: tuple[str, ...] = ALL) -> list[Module]:
    return read_modules(ROOT, roots)


@functools.cache
def spelled_alike(name: str) -> str:
    """Return a name without its underscores at both ends, in lower case, words parted by underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


@pytest.mark.slow
def test_replaced_words_are_no_name_any_more() -> None:
    found = [
        f"{module.path}:{line}: {name}: say {NAMES[spelled_alike(name)][0]}"
        for module in modules()
        for line, name in names_made(module)
        if spelled_alike(name) in NAMES
        and str(module.path).startswith(NAMES[spelled_alike(name)][1])
        and f"{module.path}: {name}" not in ALLOWED
    ]
    assert found == []


@pytest.mark.slow
def test_replaced_words_are_no_keys_any_more() -> None:
    found = [
        f"{module.path}:{line}: {key!r}: say {NAMES[spelled_alike(key)][0]}, or see wire/keys.py"
        for module in modules()
        for line, key in keys_used(module)
        if spelled_alike(key) in NAMES
        and str(module.path).startswith(NAMES[spelled_alike(key)][1])
        and f"{module.path}: {key}" not in ALLOWED_KEYS
    ]
    assert found == []


def test_allowed_keys_are_still_there() -> None:
    used = {f"{module.path}: {key}" for module in modules() for _, key in keys_used(module)}
    assert ALLOWED_KEYS.keys() <= used


def test_allowed_names_are_still_there() -> None:
    made = {f"{module.path}: {name}" for module in modules() for _, name in names_made(module)}
    assert ALLOWED.keys() <= made


def test_replaced_words_name_no_class_and_no_module() -> None:
    found = []
    for module in modules(ROOTS):
        if module.path.stem in MODULES:
            found.append(f"{module.path}: see docs/glossary.md")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                found.append(f"{module.path}:{node.lineno}: {node.name} is {CLASSES[node.name]}")
    assert found == []


@pytest.mark.slow
def test_replaced_words_of_the_worker_name_no_class() -> None:
    found = [
        f"{module.path}:{node.lineno}: {node.name} is {EVERYWHERE[node.name]}"
        for module in modules(SOURCES)
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and node.name in EVERYWHERE
    ]
    assert found == []


@pytest.mark.slow
def test_replaced_words_name_no_module_and_no_function() -> None:
    read = modules(SOURCES)
    found = [
        f"{module.path}: {name} is {MODULES_EVERYWHERE[name]}"
        for module in read
        for name in module.name.split(".")
        if name in MODULES_EVERYWHERE
    ]
    found += [
        f"{module.path}:{node.lineno}: {node.name} is {FUNCTIONS[node.name]}"
        for module in read
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
    ]
    assert found == []
