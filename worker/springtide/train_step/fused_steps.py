"""Steps of SGD on the CPU, made by torch's fused code where that has the same bits.

torch goes through an SGD's parameters one by one, with three operations for each, unless it is told
`fused=True`: then one pass over the memory does it all. 600 parameters of 1,024 numbers took 0.8 instead of
3.9 ms, 6.3 million numbers in 14 of them 3.2 instead of 4.8.

The fused code works on vectors of numbers, and what is left over at a parameter's end it rounds in another
way. So parameters that are no whole number of vectors step as before, and of the others a trial says once
whether the bits are equal here: that depends on the processor, and on how torch was built. The fused code
of the other optimizers computes their corrections in another order, and no trial would hold.

Source: `_fused_sgd` in torch/optim/sgd.py and FusedSgdKernel.cpp.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.sgd import sgd

from springtide.train_step.foreach_steps import is_free

WHOLE_VECTORS: Final = 16
"""A parameter that is fused has a multiple of so many numbers: of 64 bytes, the longest vectors there are."""
_DTYPES: Final = (torch.float32, torch.float64)
_TRIED_NUMELS: Final = (16, 48, 1 << 10, (1 << 16) + 16)
"""The last one is divided among torch's threads."""
_TRIED_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class _Split:
    """Divide one group while its optimizer steps.

    Attributes:
        group: the optimizer's own.
        params: its list of parameters.
        members: what was in that list.
        whole: those that may be fused.
        odd: the others.
        rest: a group of the others.
    """

    group: dict[str, Any]
    params: list[torch.Tensor]
    members: tuple[torch.Tensor, ...]
    whole: list[torch.Tensor]
    odd: list[torch.Tensor]
    rest: dict[str, Any]

    def fits(self) -> bool:
        """Return whether the group still has the same parameters."""
        params = self.group["params"]
        same = params is self.params and len(params) == len(self.members)
        return same and all(map(operator.is_, params, self.members))


class FusedSteps:
    """Has an SGD's groups step by fused code, and looks the same before and after. The script's thread."""

    def __init__(self) -> None:
        self._splits: dict[int, _Split] = {}
        """Splits by the group's id; each holds its group, so no other one gets the id."""
        self._open: dict[int, list[_Split]] = {}
        """Splits that are in use, by the optimizer's id."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the groups of an optimizer that is about to step, where it changes nothing but the time.

        Args:
            optimizer: any; those that are no SGD of torch's own are left alone.
        """
        self.end(optimizer)
        if type(optimizer) is not torch.optim.SGD:
            return
        used = [
            split
            for group in optimizer.param_groups
            if _says_nothing(group) and _fuses(split := self._split_of(group), optimizer)
        ]
        for split in used:
            group = split.group
            if split.odd:
                split.rest.update({**group, "params": split.odd})
                optimizer.param_groups.append(split.rest)
            group["params"], group["fused"] = split.whole, True
        if used:
            self._open[id(optimizer)] = used

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the optimizer's groups together again.

        Args:
            optimizer: that `begin` had.
        """
        for split in self._open.pop(id(optimizer), ()):
            split.group["params"], split.group["fused"] = split.params, None
            groups = optimizer.param_groups
            groups[:] = [group for group in groups if group is not split.rest]

    def _split_of(self, group: dict[str, Any]) -> _Split:
        known = self._splits.get(id(group))
        if known is None or not known.fits():
            members = tuple(group["params"])
            both: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for parameter in members:
                both[_may_be_fused(parameter)].append(parameter)
            odd, whole = both
            known = self._splits[id(group)] = _Split(group, group["params"], members, whole, odd, {})
        return known


def _says_nothing(group: Mapping[str, Any]) -> bool:
    """Return whether a script has left it to torch how the group's steps are made."""
    return is_free(group) and group.get("foreach") is None and group.get("fused") is None


def _may_be_fused(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and parameter.dtype in _DTYPES
        and parameter.numel() % WHOLE_VECTORS == 0
    )


def _fuses(split: _Split, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether those of a group that may be fused are fused in this step."""
    stepped = [parameter for parameter in split.whole if parameter.grad is not None]
    if not stepped or not _lie_alike(stepped):
        return False
    group = split.group
    if group["momentum"] != 0 and not _have_alike(stepped, optimizer.state):
        return False
    options = [bool(group[name]) for name in _OPTIONS]
    return all(has_equal_bits(dtype, *options) for dtype in {parameter.dtype for parameter in stepped})


def _lie_alike(stepped: Sequence[torch.Tensor]) -> bool:
    """Return whether each of the parameters and its gradient have their numbers in one order. The fused code
    does not look: where they differ it would train wrong.
    """
    for parameter in stepped:
        gradient = parameter.grad
        assert gradient is not None
        if not (parameter.is_contiguous() and gradient.is_contiguous() and gradient.dtype is parameter.dtype):
            return False
    return True


def _have_alike(stepped: Sequence[torch.Tensor], state: Mapping[torch.Tensor, Any]) -> bool:
    """Return whether no parameter has momentum yet, or all have it, in the order of their numbers."""
    nothing: dict[str, Any] = {}
    found = [state.get(parameter, nothing).get("momentum_buffer") for parameter in stepped]
    there = [momentum for momentum in found if momentum is not None]
    if not there:
        return True
    return len(there) == len(found) and all(
        momentum.is_contiguous() and momentum.dtype is parameter.dtype
        for momentum, parameter in zip(there, stepped, strict=True)
    )


_OPTIONS: Final = ("momentum", "weight_decay", "dampening", "nesterov", "maximize")
"""An SGD's options, each of which adds an operation."""


@functools.cache
def has_equal_bits(
    dtype: torch.dtype, momentum: bool, weight_decay: bool, dampening: bool, nesterov: bool, maximize: bool
) -> bool:
    """Return whether a few fused steps give the same bits here as those of one parameter after another.

    Args:
        dtype: of the parameters.
        momentum: whether there is any; likewise the others.
        weight_decay: as for `torch.optim.SGD`.
        dampening: as for `torch.optim.SGD`.
        nesterov: as for `torch.optim.SGD`.
        maximize: as for `torch.optim.SGD`.
    """
    options: dict[str, Any] = {
        "momentum": 0.873 * momentum,
        "weight_decay": 0.0117 * weight_decay,
        "dampening": 0.31 * dampening,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    try:
        plain, fused = (_tried(dtype, is_fused, options) for is_fused in (False, True))
    except (RuntimeError, TypeError):  # this torch has no such code for a CPU
        return False
    return all(map(torch.equal, plain, fused))


def _tried(dtype: torch.dtype, is_fused: bool, options: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return parameters and their momentum after some steps on random numbers."""
    generator = torch.Generator("cpu").manual_seed(0)  # the script's own numbers go on as they are

    def random() -> list[torch.Tensor]:
        return [torch.randn(numel, generator=generator, dtype=dtype, device="cpu") for numel in _TRIED_NUMELS]

    parameters = random()
    momenta: list[torch.Tensor | None] = [None] * len(parameters)
    with torch.no_grad():
        for _ in range(_TRIED_STEPS):
            sgd(parameters, random(), momenta, foreach=False, fused=is_fused, lr=0.0137, **options)
    return [*parameters, *(each for each in momenta if each is not None)]
