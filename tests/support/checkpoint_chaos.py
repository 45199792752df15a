"""Chaos in a job that saves: besides all else, faults in checkpoints and the loss of all workers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_chaos import Chaos
from worker_cluster import WorkerCluster, Zygote


def saving_cluster(zygote: Zygote, folder: Path, options: dict[str, Any]) -> WorkerCluster:
    """A job with a checkpoint about every tenth step."""
    volume = folder / "volume"
    volume.mkdir()
    environment = {
        "SPRINGTIDE_CHECKPOINT_URI": str(volume),
        "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2",
        "SPRINGTIDE_CHECKPOINT_KEEP": "2",
    }
    # Who begins anew begins as the reference did.
    return WorkerCluster(zygote, folder, options | {"same_start": True}, environment=environment)


class SavingChaos(Chaos):
    """The anchor is spared but for `wipe`, which makes another worker the anchor."""

    kind = "checkpoints"

    def strike(self) -> None:
        if self.random.random() < 0.15 and not self.cluster.finished():
            self.wipe()
        else:
            super().strike()

    def wipe(self) -> None:
        """kill -9 all workers, and start two others."""
        self._say("kill all workers")
        for worker in self.cluster.workers:
            if worker.running:
                worker.kill()
        self.cluster.until(lambda: not any(w.running for w in self.cluster.workers), "the end of all workers")
        if self.cluster.finished():
            self.anchor = self.cluster.finished()[0]
            return
        self.anchor, other = self.cluster.add(hold=False), self.cluster.add(hold=False)
        self._say(f"start {self.anchor.name}, the anchor, and {other.name}")


class ShardChaos(SavingChaos):
    """The same where the optimizer's state is in shards: both holders of one may be lost before a checkpoint.

    Then nobody holds the state any more, the anchor has to leave, and another one takes its place.
    """

    kind = "shards"

    def strike(self) -> None:
        self.replace_anchor()
        super().strike()

    def replace_anchor(self) -> None:
        if self.anchor.running or "leaving the job: StateLost" not in self.anchor.log():
            return
        if self.cluster.finished():
            self.anchor = self.cluster.finished()[0]
            return
        self.anchor = self.cluster.add(hold=False)
        self._say(f"the state is lost with its holders: start {self.anchor.name}, the anchor")
