"""Parameters that wait for their values when they are looked at, whatever way the look comes.

A forward pass waits module by module (`forward_waits`). But scripts also use a weight where no module runs:
an average of the weights by hand, a norm as a regulariser, a tied projection, a printed value. So between a
step and the arrival of its values a parameter is of the class `LazyParameter`, to which torch gives every
operation on it first. Once the values are here it is what it was, and nothing is in the way of any operation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.nn import Parameter

_P = ParamSpec("_P")
_R = TypeVar("_R")
Wait = Callable[[Collection[int] | None], None]

looking = torch._C.DisableTorchFunctionSubclass
"""Context for the library's own looks at what is known of a parameter without its values."""


def only_looks(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap what the library does with parameters whose values it does not use."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with looking():
            return method(*args, **kwargs)

    return wrapped


# fmt: off
_LOOKS_AT: Final = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "_version",
    "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized",
    "retains_grad", "output_nr",
)
_CALLS: Final = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "get_device", "requires_grad_", "retain_grad",
    "register_hook", "register_post_accumulate_grad_hook", "__len__",
)
# fmt: on
_LOOKS: Final = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _LOOKS_AT]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [getattr(torch.Tensor, name) for name in _CALLS]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)
"""Attributes and methods that do not touch values."""

_GRAD: Final[Any] = torch._C.TensorBase.grad

_owners: dict[int, tuple[Pending, int]] = {}
"""Holders that wait for parameters, by id() of the parameter, and its number there."""


class LazyParameter(Parameter):
    """A parameter whose values may be on their way."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKS and await_all((args, kwargs)):
            return func(*args, **kwargs)
        with looking():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if await_all(self):
            return self.__deepcopy__(memo)  # of the class that it is of now
        return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    # zero_grad() looks at it between a step and the next one's values: without the way through torch.
    @property
    def grad(self) -> torch.Tensor | None:
        with looking():
            found: torch.Tensor | None = super().grad
            return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with looking():
            _GRAD.__set__(self, value)


class Pending:
    """Wait for the values of one trainer's parameters, by number.

    wait: waits until the values of some have come; None: nobody waits.

    Values are waited for by the thread that expects them, and by no other: others see what is there.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.wait: Wait | None = None
        # Others' subclasses stay what they are; what has no elements has no values.
        self._parameters = {
            number: item for number, item in enumerate(parameters) if type(item) is Parameter and item.numel()
        }
        self._expecting = self._waiting = False
        self._thread = 0

    def expect(self, numbers: Collection[int] | None = None) -> None:
        """The values of these parameters (None: all) may be on their way from here on."""
        if self.wait is None:
            return
        if not self._thread:
            _owners.update({id(item): (self, number) for number, item in self._parameters.items()})
        self._thread, self._expecting = threading.get_ident(), True
        for number in self._parameters if numbers is None else numbers:
            if (item := self._parameters.get(number)) is not None:
                item.__class__ = LazyParameter

    def mark_arrived(self, numbers: Collection[int] | None) -> None:
        """The values of these parameters (None: all) are here."""
        if not self._expecting:
            return
        if numbers is None:
            numbers, self._expecting = self._parameters, False
        for number in numbers:
            if (item := self._parameters.get(number)) is not None:
                item.__class__ = Parameter

    def close(self) -> None:
        """Nobody waits any more."""
        self.mark_arrived(None)
        for item in self._parameters.values():
            _owners.pop(id(item), None)
        self.wait = None

    def bring(self, numbers: Collection[int]) -> bool:
        """Wait for the values of these. False: that is not for the caller to do."""
        if self._waiting or self.wait is None or self._thread != threading.get_ident():
            return False
        self._waiting = True
        try:
            self.wait(numbers)
        finally:
            self._waiting = False
        self.mark_arrived(numbers)
        return True


@_disable_dynamo
def await_all(value: Any) -> bool:
    """Wait for all parameters in a value of nested sequences and mappings. True: none is awaited any more."""
    numbers: dict[Pending, list[int]] = {}
    for item in _awaited_in(value):
        owner = _owners.get(id(item))
        if owner is None:
            item.__class__ = Parameter  # a copy that somebody has made of the class
        else:
            numbers.setdefault(owner[0], []).append(owner[1])
    brought = [pending.bring(own) for pending, own in numbers.items()]
    return all(brought)


def _awaited_in(value: Any) -> Iterator[Parameter]:
    if type(value) is LazyParameter:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _awaited_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _awaited_in(item)
