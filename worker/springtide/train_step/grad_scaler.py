"""GradScaler as a part of the step: it sees gradients only when they are complete, and a dropped body leaves
no trace in it.

`unscale_` and `step` look for infinities in the gradients that are there. These have to be the averages of
all members: then all members find the same, and a step is skipped by all of them or by none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from springtide.comm.process_group import Group

_ATTRIBUTES = ("grad_scale", "found_inf")

Watcher = Callable[[GradScaler, torch.optim.Optimizer], None]
Elsewhere = Callable[[torch.optim.Optimizer], bool | None]
"""Whether a gradient of this optimizer is not finite among those elsewhere; None where there are no such."""
_watchers: list[Watcher] = []

Unscaler = Callable[[torch.optim.Optimizer, float, Mapping[torch.device, torch.Tensor]], None]
"""(optimizer, what to multiply its gradients by, the found_inf of each device, to be filled with 1)."""
_unscalers: list[Unscaler] = []


def watch(watcher: Watcher) -> Callable[[], None]:
    """Call the watcher before any scaler of this process looks at an optimizer's gradients; return how to
    stop that.

    The library has to know of scalers that it was not given: they write gradients without moving their
    version.
    """
    _watchers.append(watcher)
    _install()
    return lambda: _watchers.remove(watcher)


def unscale_too(unscaler: Unscaler) -> None:
    """Call this for gradients that no parameter shows, whenever a scaler of this process unscales or looks at
    those of an optimizer.
    """
    _unscalers.append(unscaler)
    _install()


_unscale = GradScaler._unscale_grads_


def _install() -> None:
    if GradScaler._unscale_grads_ is not _watched:
        GradScaler._unscale_grads_ = _watched  # type: ignore[method-assign,assignment]


def _watched(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    inverse: torch.Tensor,
    found_inf: torch.Tensor,
    fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    for watcher in list(_watchers):
        watcher(scaler, optimizer)
    found = _unscale(scaler, optimizer, inverse, found_inf, fp16)
    for unscaler in _unscalers:
        unscaler(optimizer, float(inverse), found)
    return found


class Scalings:
    """The scalers of one script, hooked into as `Scaling` says."""

    def __init__(
        self,
        tracked: Collection[Any],
        optimizers: Sequence[torch.optim.Optimizer],
        reduce: Callable[[torch.optim.Optimizer], None],
        skipped: Callable[[torch.optim.Optimizer], None],
        elsewhere: Elsewhere,
        here: bool = True,
    ) -> None:
        """tracked: among other objects, the scalers."""
        self.scalers = [item for item in tracked if isinstance(item, GradScaler)]
        self._all = [Scaling(item, optimizers, reduce, skipped, elsewhere, here) for item in self.scalers]

    def begin(self) -> None:
        """A body begins."""
        for scaling in self._all:
            scaling.begin()

    def found(self) -> bool:
        """Whether a gradient was not finite in this body."""
        return any(scaling.found() for scaling in self._all)

    def scale(self) -> float:
        """Return the factor by which losses are multiplied now, and gradients until they are unscaled."""
        return math.prod(float(scaler.get_scale()) for scaler in self.scalers if scaler.is_enabled())

    def inverse(self, optimizer: torch.optim.Optimizer) -> float:
        """Return what this optimizer's gradients are multiplied by; those on servers still lack it."""
        return math.prod(scaling.inverses.get(id(optimizer), 1.0) for scaling in self._all)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has made its step: another one of the body has a scale of its own."""
        for scaling in self._all:
            scaling.inverses.pop(id(optimizer), None)


def enabled_among(tracked: Mapping[str, Any]) -> list[str]:
    """Names of the scalers that scale."""
    return [name for name, item in tracked.items() if isinstance(item, GradScaler) and item.is_enabled()]


class Scaling:
    """Hooks into one scaler's calls for our optimizers.

    reduce: called before gradients are looked at. skipped: called when the optimizer's step has been left
    out. elsewhere: asked then whether a gradient is not finite among those whose sums are not in this process
    (on servers, or beside the parameters); None where there are no such. here: others are in this process.
    inverses: by id() of an optimizer, what its gradients are multiplied by.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        reduce: Callable[[torch.optim.Optimizer], None],
        skipped: Callable[[torch.optim.Optimizer], None],
        elsewhere: Elsewhere = lambda optimizer: None,
        here: bool = True,
    ) -> None:
        ours = {id(optimizer) for optimizer in optimizers}
        self._found: list[torch.Tensor] = []
        self.inverses: dict[int, float] = {}
        unscale, maybe_step = scaler._unscale_grads_, scaler._maybe_opt_step

        def unscale_complete(
            optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found_inf: torch.Tensor, fp16: bool
        ) -> Any:
            if id(optimizer) in ours:
                reduce(optimizer)
                broken = elsewhere(optimizer)
                assert scaler._scale is not None
                self.inverses[id(optimizer)] = float(scaler._scale.double().reciprocal().float())
                if broken is not None and not here:
                    self._found.append(found_inf.fill_(float(broken)))
                    return {found_inf.device: found_inf}
                if broken:
                    found_inf.fill_(1.0)
            found = unscale(optimizer, inverse, found_inf, fp16)
            self._found.extend(found.values())
            return found

        def step_or_skip(
            optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            result = maybe_step(optimizer, optimizer_state, *args, **kwargs)
            if id(optimizer) in ours and _any(optimizer_state["found_inf_per_device"].values()):
                skipped(optimizer)
            return result

        scaler._unscale_grads_ = unscale_complete  # type: ignore[method-assign,assignment]
        scaler._maybe_opt_step = step_or_skip  # type: ignore[method-assign]

    def begin(self) -> None:
        """A body begins."""
        self._found, self.inverses = [], {}

    def found(self) -> bool:
        """Whether a gradient was not finite in this body."""
        return _any(self._found)


class ScalerState:
    """The part of a scaler that a body changes: scale, growth, and its stage with each optimizer.

    It is not taken by state_dict(), which would wait for the device.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._scale: torch.Tensor | None = None
        self._growth: torch.Tensor | None = None

    def remember(self) -> None:
        if not self._scaler.is_enabled():
            return
        scale, growth = self._scaler._scale, self._scaler._growth_tracker
        self._scale = None if scale is None else scale.clone()
        self._growth = None if growth is None else growth.clone()

    def put_back(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not self._scaler.is_enabled():
            return
        # As update() does: clones, so that the remembered ones stay what they are.
        self._scaler._scale = None if self._scale is None else self._scale.clone()
        self._scaler._growth_tracker = None if self._growth is None else self._growth.clone()
        self._scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for optimizer in optimizers:
            # A body that was left inside of scaler.step() has not taken them away.
            for name in _ATTRIBUTES:
                vars(optimizer).pop(name, None)


def agree(scalers: Sequence[GradScaler], group: Group) -> None:
    """Have all members go on with the first one's scales: sums of their gradients have one scale.

    Args:
        scalers: of the script, in an order that all members have.
        group: of the generation.

    Raises:
        RuntimeError: the group's, when a member is lost meanwhile.
    """
    enabled = [scaler for scaler in scalers if scaler.is_enabled()]
    if group.size == 1 or not enabled:
        return
    told = torch.zeros(len(enabled), 2, dtype=torch.float64)
    if group.rank == 0:
        states = [scaler.state_dict() for scaler in enabled]
        told[:] = torch.tensor([[state["scale"], state["_growth_tracker"]] for state in states])
    group.start_sum(told).wait()
    for scaler, (scale, growth) in zip(enabled, told.tolist(), strict=True):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})


def _any(found: Any) -> bool:
    return any(bool(value.item()) for value in found)
