"""Comparison of the workers' results at a job's end with those of a process that trained alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference
from worker_script import make_data, make_model

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

_NOTHING_LEARNT = math.log(3)


def check_equal(
    cluster: WorkerCluster, members: list[Worker], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Check that the members finished with one model and every sample once an epoch; return their results."""
    samples, epochs = options["samples"], options["epochs"]
    steps = epochs * math.ceil(samples / options["batch"])
    results = []
    for member in members:
        assert isinstance(member.outcome(), outcome.Finished), cluster.logs()
        result = member.result()
        assert result is not None
        results.append(result)
        audit = result["audit"]
        found = (result["step"], audit["epoch"], audit["totalSeen"], audit["repeated"], audit["lost"])
        assert found == (steps, epochs, epochs * samples, 0, 0), cluster.logs()
    for name in ("parameters", "buffers", "rate_at_end"):
        assert len({result[name] for result in results}) == 1, name
    return results


def check_as_good(
    cluster: WorkerCluster,
    members: list[Worker],
    reference: Reference,
    options: Mapping[str, Any],
    kind: str = "plain",
) -> None:
    """Check that the members agree, and that their model has learnt about as much as a plain reference.

    Args:
        kind: of the model.
    """
    values = check_equal(cluster, members, options)[0]["values"]
    ours = loss_of(values, options["samples"], kind)
    theirs = loss_of(reference.values, options["samples"])
    assert ours < theirs + 0.25 * (_NOTHING_LEARNT - theirs), (ours, theirs)


def loss_of(values: list[float], samples: int, kind: str = "plain") -> float:
    """Return the loss, over all samples, of the model with these parameters."""
    model = make_model(kind)
    torch.nn.utils.vector_to_parameters(torch.tensor(values), model.parameters())
    x, y = make_data(samples)
    return float(F.cross_entropy(model(x), y).detach())


def commits(cluster: WorkerCluster) -> Counter[int]:
    """How often each step or range was committed, by any worker."""
    return Counter(commit["step"] for worker in cluster.workers for commit in worker.commits())


def reply(cluster: WorkerCluster) -> pb.SyncReply:
    """The coordinator's last word; at first one that says nothing."""
    return cluster.reply or pb.SyncReply()
