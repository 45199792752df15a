"""What a runtime gives the exchange with the servers, and the model's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from springtide.environment import Settings
from springtide.exchange.layout import Layout
from springtide.pending import Pending
from springtide.ps.compression import RangeWire, Wire
from springtide.ps.forward_waits import ForwardWaits, Wait
from springtide.servers.exchange import MakeServers, ServerExchange
from springtide.servers.switching import SwitchingExchange, SwitchingTeams
from springtide.servers.within import WithinExchange

_BEYOND_COORDINATOR = 60.0
"""An answer may wait for another member for as long as the coordinator lets it live."""


def exchange_for(settings: Settings) -> MakeServers:
    """How a trainer makes its exchange."""

    def make(
        parameters: dict[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        with_norm: bool,
    ) -> ServerExchange:
        kind: Callable[..., ServerExchange] = WithinExchange
        wire = Wire
        if settings.strategy == "ParameterServer":
            wire = RangeWire
            kind = partial(SwitchingExchange, in_ranges=settings.asynchronous, early=settings.early_values)
        if settings.strategy == "ParameterServer" and settings.group_size > 1:
            kind = partial(
                SwitchingTeams,
                in_ranges=settings.asynchronous,
                group_size=settings.group_size,
                address=settings.pod_ip,
                collective_seconds=settings.collective_seconds,
            )
        return kind(
            parameters,
            layout,
            optimizers,
            me=settings.process_id,
            token=settings.token,
            replication=settings.replication,
            with_norm=with_norm,
            connect_seconds=settings.connect_seconds,
            answer_seconds=settings.collective_seconds + _BEYOND_COORDINATOR,
            authority=settings.authority,
            dense=settings.strategy == "ParameterServer",
            wire=wire(settings.push_compression, settings.top_k_ratio),
        )

    return make


def wait_for_values(models: Sequence[torch.nn.Module], wait: Wait, pending: Pending) -> None:
    """Have each model's forward wait for what it needs, and whoever else looks at a parameter."""
    pending.wait = wait
    trained = [item for item in torch.nn.ModuleList(models).parameters() if item.requires_grad]
    numbers = {id(item): number for number, item in enumerate(trained)}
    for model in models:
        ForwardWaits(model, numbers, wait)
