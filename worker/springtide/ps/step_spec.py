"""The script's optimizers as the servers run them. PURE."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from springtide.errors import UsageError
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.optim import UpdateError, allowed_options

log = logging.getLogger("springtide")

_NAMES: Final[dict[type[torch.optim.Optimizer], str]] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}
_FROM_THE_START: Final[dict[str, tuple[str, ...]]] = {
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
}
"""Options whose state torch makes in a parameter's first step only: it fails when they are set later."""


class ServerOptimizers:
    """All optimizers of a script. parameters: the trained ones by name; each is in one optimizer at most.

    Where a body has several optimizer steps, each optimizer's step is staged when the script makes it, with
    the options of that moment, and `step_spec` is of all that are staged. Raise UsageError for what servers
    do not have.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self.all = list(optimizers)
        self._names = [optimizer_name(optimizer) for optimizer in self.all]
        self._held = [_held_by(optimizer) for optimizer in self.all]
        self._firsts, self._among = [], 0
        for optimizer in self.all:
            self._firsts.append(self._among)
            self._among += len(optimizer.param_groups)
        self.groups: dict[str, int] = {}
        self.owners: dict[str, int] = {}
        for number, optimizer in enumerate(self.all):
            for name, group in group_numbers(optimizer, parameters).items():
                if name in self.owners:
                    raise UsageError(
                        f"distribute(): parameter {name} is in two optimizers: on parameter servers each has "
                        "one; put it into one of them, or use strategy.type AllReduce"
                    )
                self.groups[name], self.owners[name] = group, number
        self._staged: dict[int, tuple[tuple[dict[str, Any], ...], float, frozenset[int]]] = {}
        self._stepped: set[int] = set()  # in the running body
        self.skipped: set[int] = set()
        """Numbers of those whose step of the body a GradScaler has left out."""
        self._norms: list[float] = []
        self._trains = self._loaded = self._dense = self._warned = False
        self._without: list[list[tuple[str, ...]]] = []
        for optimizer in self.all:
            optimizer.register_load_state_dict_post_hook(self._note_loaded)
            optimizer.register_state_dict_pre_hook(self._note_saved)
        self._owner = {index: self.owners.get(name) for index, name in enumerate(parameters)}

    def square(self, number: int, value: float) -> dict[str, float]:
        """Return a sum of squares of an optimizer's gradients in the form that `norm` takes.

        Args:
            number: Of the optimizer.
            value: The sum.
        """
        return {str(self._firsts[number]): value}

    def norm(self, squares: Sequence[Mapping[str, float]]) -> float:
        """Return the norm of all sums of gradients, and remember each optimizer's.

        Args:
            squares: Of each server, the sums of squares by optimizer, which is named by the place of its
                first group among those of all.
        """
        keys = [str(first) for first in self._firsts]
        self._norms = [math.sqrt(math.fsum(float(own.get(key, 0.0)) for own in squares)) for key in keys]
        return math.sqrt(math.fsum(float(value) for own in squares for value in own.values()))

    def make(self, values: torch.Tensor, pieces: Sequence[Sequence[int]], number: int = 0) -> Chunk:
        """Return a chunk with the options of an optimizer.

        Args:
            values: Flat; the chunk keeps them.
            pieces: See `Chunk`.
            number: Of the optimizer.
        """
        options = group_options(self.all[number])
        return Chunk(values, pieces, self._names[number], options, self._firsts[number], self._among)

    def state_of(self, number: int) -> Mapping[Any, Mapping[str, Any]]:
        """The state that optimizer `number` has in this process."""
        return self.all[number].state

    def forget(self, parameters: Collection[torch.Tensor]) -> None:
        """The state of these parameters is the servers'."""
        for optimizer in self.all:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)

    def check_unchanged(self, dense: bool) -> None:
        """Refuse, before a step, what the script has changed and the servers do not hear of.

        Args:
            dense: All states are the servers'.

        Raises:
            UsageError: Such a change was made.
        """
        self._check_groups()
        if not self._trains:
            self._without = [_without(optimizer) for optimizer in self.all]
        self._trains, self._dense = True, dense
        if dense and self._loaded:
            raise UsageError(
                "load_state_dict() of an optimizer after training began: its state lives on the parameter "
                "servers. Call it before the first batch, or set options in optimizer.param_groups"
            )

    def _check_groups(self) -> None:
        """Raise UsageError when the script has changed which parameters the optimizers have."""
        for optimizer, held in zip(self.all, self._held, strict=True):
            if _held_by(optimizer) != held:
                raise UsageError(
                    f"the parameter groups of {type(optimizer).__name__} were changed after distribute(), "
                    "and the parameter servers have them as they were then: add all groups before "
                    "distribute(), and call requires_grad_(False) after it for what is not trained yet"
                )
        for optimizer, groups in zip(self.all, self._without, strict=False):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                if now := [name for name in names if group[name]]:
                    raise UsageError(
                        f"option {now[0]} of {type(optimizer).__name__} was switched on after training "
                        "began: torch has no state for it then. Set it before the first batch"
                    )

    def _note_saved(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trains and self._dense and not self._warned:
            self._warned = True
            log.warning(
                "state_dict() of %s has its options only: its state lives on the parameter servers. "
                "spec.checkpoint saves both",
                type(optimizer).__name__,
            )

    def _note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._loaded = self._trains

    def begin(self) -> None:
        """A body begins, or has been committed."""
        self._staged, self.skipped, self._stepped = {}, set(), set()

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler leaves this optimizer's step out."""
        self.skipped.add(self._number(optimizer))

    def finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all sums of this optimizer's gradients are, as of the last `norm`."""
        return math.isfinite(self._norms[self._number(optimizer)])

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(number for number, own in enumerate(self.all) if own is optimizer)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Numbers of its parameters."""
        number = self._number(optimizer)
        return [index for index, owner in self._owner.items() if owner == number]

    @property
    def staged(self) -> frozenset[int]:
        """Numbers of those whose step is staged."""
        return frozenset(self._staged)

    def is_staged(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._number(optimizer) in self._staged

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float = 1.0,
        resting: Collection[int] = (),
    ) -> float:
        """Stage one optimizer's step of a body that may have several.

        Args:
            optimizer: The one that steps.
            clip_norm: Bound of the norm of its own gradients, which are the sums times `scale` and `inverse`;
                None: there is none.
            scale: Of the whole step.
            inverse: A GradScaler's.
            resting: Parameters whose gradients the script has taken away.

        Returns:
            The factor by which gradients are multiplied besides `scale`.

        Raises:
            UsageError: It has made the step already.
        """
        number = self._number(optimizer)
        self.skipped.discard(number)
        if number in self._staged:
            raise UsageError(
                f"a second step of the same optimizer ({type(optimizer).__name__}) in one body takes "
                "strategy.parameterServer.consistency Synchronous, or strategy.type AllReduce"
            )
        norm = 0.0 if clip_norm is None else self._norms[number] * abs(scale * inverse)
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        self._staged[number] = group_options(optimizer), factor * inverse, frozenset(resting)
        self._stepped.add(number)
        return factor * inverse

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the norm of the sums of its gradients, from the last `norm`; 0 before."""
        return self._norms[self._number(optimizer)] if self._norms else 0.0

    def steps_again(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has made a step in the running body."""
        return self._number(optimizer) in self._stepped

    def has_stepped(self, index: int) -> bool:
        """Whether the optimizer of parameter `index` has made a step in the running body."""
        return self._owner.get(index) in self._stepped

    @property
    def options(self) -> tuple[dict[str, Any], ...]:
        """The groups' options of all optimizers, as the script has set them. Raise UsageError."""
        self._check_groups()
        return tuple(group for optimizer in self.all for group in group_options(optimizer))

    def step_spec(self, scale: float, unused: Collection[int], skip: bool) -> StepSpec:
        """Return how the servers make the step of all optimizers, or of those that are staged.

        Args:
            scale: The factor by which sums are multiplied.
            unused: Numbers of parameters to which no worker had a gradient.
            skip: The step changes nothing.

        Raises:
            UsageError: The script has changed the optimizers' groups.
        """
        self._check_groups()
        if not self._staged:
            return StepSpec(scale, skip, self.options, frozenset(unused))
        now = [group_options(optimizer) for optimizer in self.all]
        groups, factors = list[dict[str, Any]](), list[float]()
        for number, own in enumerate(now):
            options, factor, _ = self._staged.get(number, (own, 1.0, frozenset()))
            groups += options
            factors += [factor] * len(options)
        resting = {index for index, number in self._owner.items() if number not in self._staged}
        resting = resting.union(*(staged[2] for staged in self._staged.values()))
        self._staged = {}
        plain = all(factor == 1.0 for factor in factors)
        left_out = frozenset(unused) | resting
        return StepSpec(scale, skip, tuple(groups), left_out, () if plain else tuple(factors))


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The servers' name of the optimizer. Raise UsageError for one that they do not have."""
    name = _NAMES.get(type(optimizer))
    if name is None:
        known = ", ".join(kind.__name__ for kind in _NAMES)
        raise UsageError(
            f"distribute(): parameter servers do not have the optimizer {type(optimizer).__name__}: use one "
            f"of {known}, or strategy.type AllReduce"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError(
                "distribute(): an optimizer with differentiable=True cannot run on parameter servers"
            )
    try:
        group_options(optimizer)
    except UpdateError as error:
        raise UsageError(f"distribute(): parameter servers refuse the optimizer: {error}") from None
    return name


def group_options(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The options of each parameter group as they are now, in JSON's types.

    Raise UsageError for what is no number.
    """
    allowed = allowed_options(_NAMES[type(optimizer)])
    return tuple(
        {name: _plain(name, value) for name, value in group.items() if name in allowed}
        for group in optimizer.param_groups
    )


def _without(optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    """Return by parameter group which of the options that have to be set from the start are not."""
    names = _FROM_THE_START.get(optimizer_name(optimizer), ())
    return [tuple(name for name in names if not group[name]) for group in optimizer.param_groups]


def _held_by(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return by parameter group the id() of its parameters."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def group_numbers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the parameter group of each parameter that the optimizer has.

    Args:
        optimizer: The optimizer.
        parameters: By name.

    Returns:
        Numbers of groups by name.
    """
    owner = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {name: owner[id(item)] for name, item in parameters.items() if id(item) in owner}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, int | float):
        return value
    raise UsageError(
        f"the optimizer's option {name} is {value!r}: on parameter servers it has to be a number, or a "
        "tensor of one"
    )
