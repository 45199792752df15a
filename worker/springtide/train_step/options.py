"""How the models of a script are trained, as `distribute()` and the settings say it to one `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from springtide.comm.buckets import Buckets
from springtide.comm.combine import Rule
from springtide.comm.compression import make_buckets
from springtide.comm.layout import Layout
from springtide.exact.buckets import ExactBuckets
from springtide.exact.settings import describe
from springtide.ps.backend import MakeBackend
from springtide.sharding.backend import ShardedOptimizer
from springtide.sharding.buckets import PassingBuckets

MakeShards = Callable[
    [dict[str, torch.nn.Parameter], Layout, Sequence[torch.optim.Optimizer], bool], ShardedOptimizer
]
"""(trained parameters by name, their layout, optimizers, whether the gradients' norm is wanted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How the models are trained.

    Attributes:
        bucket_bytes: of gradients that are summed at a time, about.
        clip_norm: global norm that gradients are clipped to; None: they are not.
        multi_step: a body may make more than one optimizer step, and is committed when it ends.
        rules: for buffers; see `Buffers`.
        logical_workers: 0 unless sums are to be exact.
        backend: what sums: Auto, Gloo or NCCL.
        compression: of the gradients that workers sum among themselves.
        make_servers: connects with parameter servers; None: there are none.
        make_shards: cuts the optimizer's state over the workers; None: each has all of it.
        keeps_gradients: buckets keep gradients until the next step.
        masters: parameters of 16 bits have float32 masters, which the optimizer steps.
    """

    bucket_bytes: int
    clip_norm: float | None = None
    multi_step: bool = False
    rules: Mapping[str, Rule] = field(default_factory=dict)
    logical_workers: int = 0
    backend: str = "Auto"
    compression: str = "None"
    make_servers: MakeBackend | None = None
    make_shards: MakeShards | None = None
    keeps_gradients: bool = True
    masters: bool = False

    def make_buckets(self, layout: Layout, device: torch.device) -> Buckets:
        """Return the buckets that gradients gather in.

        Args:
            layout: of the gradients.
            device: of the model.
        """
        if self.logical_workers:
            return ExactBuckets(layout, self.logical_workers, device)
        if self.make_shards is not None and not self.keeps_gradients:
            return PassingBuckets(layout, device)
        return make_buckets(self.compression, layout, device, self.multi_step)

    def agreed_text(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        exchange: str,
        *,
        servers: str,
        pod: str,
    ) -> str:
        """Return in what all members must agree besides the layout of their state, for its hash.

        Args:
            optimizers: of the script.
            device: of the model.
            exchange: what sums the gradients, "gloo" or "nccl".
            servers: describes how parameter servers are used; "": they are not.
            pod: describes the mesh of the pod's processes; "": there is none.
        """
        place = f" on servers {servers}" if servers else ""
        place += "" if self.make_shards is None else " optimizer in shards"
        place += "" if self.keeps_gradients else " gradients too"
        place += " masters" if self.masters else ""
        sums = describe(self.logical_workers, device)
        settings = f"{sums} {device.type} {exchange}{place} {self.compression}"
        kinds = " ".join(type(optimizer).__name__ for optimizer in optimizers)
        text = f"{kinds} {self.clip_norm} {settings}{' several' if self.multi_step else ''}"
        if self.logical_workers and (self.clip_norm is not None or self.make_shards is not None):
            text += " norms by shards, factors one by one"  # earlier releases have other bits
        text += "".join(f" {name}={rule}" for name, rule in sorted(self.rules.items()))
        return f"{text} pods of {pod}" if pod else text
