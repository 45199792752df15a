"""Steps of SGD on the CPU, made by torch's fused code where that has the same bits.

torch goes through an SGD's parameters one by one, with three operations for each, unless it is told
`fused=True`: then one pass over the memory does it all. 600 parameters of 1,024 numbers took 0.8 instead of
3.9 ms, 6.3 million numbers in 14 of them 3.2 instead of 4.8.

The fused code works on vectors of numbers, and what is left over at a parameter's end it rounds in another
way. So parameters that are no whole number of vectors are put back behind the step, and stepped as before;
of the others a trial says once whether the bits are equal here: that depends on the processor, and on how
torch was built. The fused code of the other optimizers computes their corrections in another order, and no
trial would hold.

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

from springtide.train_step.foreach_steps import is_dense_on_cpu, is_free

WHOLE_VECTORS: Final = 16
"""A parameter that is fused has a multiple of so many numbers: of 64 bytes, the longest vectors there are."""
_MOST_ODD: Final = 1 << 14
"""Most numbers of a group that are stepped twice."""
_TRIED_NUMELS: Final = (16, 48, 1 << 10)
_TRIED_BY_THREADS: Final = (1 << 16) + 16
"""A parameter that torch's threads divide among them, where there are several."""
_TRIED_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class _Split:
    """Divide the parameters of one group.

    Attributes:
        group: the optimizer's own.
        members: its parameters when they were divided.
        odd: those that are no whole number of vectors.
        may_be_fused: whether the fused code has steps for all of them, and most are whole.
    """

    group: dict[str, Any]
    members: tuple[torch.Tensor, ...]
    odd: list[torch.Tensor]
    may_be_fused: bool

    def fits(self) -> bool:
        """Return whether the group still has the same parameters."""
        params = self.group["params"]
        return len(params) == len(self.members) and all(map(operator.is_, params, self.members))


@dataclass(frozen=True, slots=True)
class _Before:
    """Hold what a parameter that is stepped as before was before the step.

    Attributes:
        parameter: it.
        value: its numbers.
        momentum: likewise; None: it had none.
    """

    parameter: torch.Tensor
    value: torch.Tensor
    momentum: torch.Tensor | None


class FusedSteps:
    """Sets `fused` in an SGD's groups while it steps. The script's thread.

    The parameters that are not to be fused step with the others, and are put back and stepped as before when
    the step is over: so the groups have the same parameters for whoever looks at them meanwhile.
    """

    def __init__(self) -> None:
        self._splits: dict[int, _Split] = {}
        """Splits by the group's id; each holds its group, so no other one gets the id."""
        self._set: list[tuple[_Split, list[_Before]]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Set it in the groups of an optimizer that is about to step, where it changes nothing but the time.

        Args:
            optimizer: any; those that are no SGD of torch's own are left alone.
        """
        self._reset()  # after a step that raised
        if type(optimizer) is not torch.optim.SGD:
            return
        for group in optimizer.param_groups:
            if _says_nothing(group) and _fuses(split := self._split_of(group), optimizer):
                before = [
                    _Before(odd, odd.detach().clone(), _copied(optimizer.state.get(odd)))
                    for odd in split.odd
                    if odd.grad is not None
                ]
                group["fused"] = True
                self._set.append((split, before))

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back what `begin` has set, and step what was not to be fused.

        Args:
            optimizer: whose step is over.
        """
        done, self._set = self._set, []
        for split, before in done:
            split.group["fused"] = None
            if before:
                _step_again(split.group, before, optimizer.state)

    def _reset(self) -> None:
        for split, _ in self._set:
            split.group["fused"] = None
        self._set.clear()

    def _split_of(self, group: dict[str, Any]) -> _Split:
        known = self._splits.get(id(group))
        if known is None or not known.fits():
            members = tuple(group["params"])
            odd = [parameter for parameter in members if parameter.numel() % WHOLE_VECTORS]
            may_be = (
                len(odd) < len(members)
                and sum(parameter.numel() for parameter in odd) <= _MOST_ODD
                and all(map(_is_plain, members))
            )
            known = self._splits[id(group)] = _Split(group, members, odd, may_be)
        return known


def _copied(state: Mapping[str, Any] | None) -> torch.Tensor | None:
    momentum = None if state is None else state.get("momentum_buffer")
    return None if momentum is None else momentum.clone()


def _step_again(
    group: Mapping[str, Any], before: Sequence[_Before], state: Mapping[torch.Tensor, Any]
) -> None:
    """Put parameters and their momentum back, and step them one after another.

    Args:
        group: with the options of the step.
        before: what they were.
        state: of the optimizer.
    """
    options = {name: group[name] for name in ("lr", *_OPTIONS)}
    momenta = [each.momentum for each in before]
    parameters = [each.parameter for each in before]
    with torch.no_grad():
        for each in before:
            each.parameter.copy_(each.value)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sgd(parameters, gradients, momenta, foreach=False, fused=False, **options)
        if group["momentum"] != 0:
            for parameter, momentum in zip(parameters, momenta, strict=True):
                assert momentum is not None
                state[parameter]["momentum_buffer"].copy_(momentum)


def _says_nothing(group: Mapping[str, Any]) -> bool:
    """Return whether a script has left it to torch how the group's steps are made."""
    return is_free(group) and group.get("foreach") is None and group.get("fused") is None


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter) in (torch.nn.Parameter, torch.Tensor) and is_dense_on_cpu(parameter)


def _fuses(split: _Split, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a group is fused in this step."""
    if not split.may_be_fused:
        return False
    stepped = [parameter for parameter in split.members if parameter.grad is not None]
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
    numels = [*_TRIED_NUMELS, *([_TRIED_BY_THREADS] if torch.get_num_threads() > 1 else [])]

    def random() -> list[torch.Tensor]:
        return [torch.randn(numel, generator=generator, dtype=dtype, device="cpu") for numel in numels]

    parameters = random()
    momenta: list[torch.Tensor | None] = [None] * len(parameters)
    with torch.no_grad():
        for _ in range(_TRIED_STEPS):
            sgd(parameters, random(), momenta, foreach=False, fused=is_fused, lr=0.0137, **options)
    return [*parameters, *(each for each in momenta if each is not None)]
