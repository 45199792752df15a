"""A make-believe accelerator, for tests of code that keeps tensors on a device.

Its tensors say that they lie on `DEVICE` and compute on the CPU. They mix with tensors of the CPU as little
as a real device's do, fused optimizers refuse what CUDA's kernels refuse, and each time the host has to wait
for a value is noted in `Accelerator.syncs`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import one_operator  # noqa: F401 (ranks use it, which are threads)
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import springtide

DEVICE = torch.device("meta")
"""A type of device for which torch slices views without a driver."""

_PACKAGE = str(Path(springtide.__file__).parent)
_aten: Any = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class There(torch.Tensor):
    """A tensor of the make-believe device; `here` holds its values."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: There = make(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )
        made.here = here.detach()
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.here!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the accelerator's context")


class Accelerator(TorchDispatchMode):
    """Yield with the device in place. syncs: where the host waited for it, innermost call last."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return There(tensor.detach().clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        there = [item for item in tensors if isinstance(item, There)]
        made_there = kwargs.get("device") is not None and torch.device(kwargs["device"]) == DEVICE
        if not there and not made_there:
            return func(*args, **kwargs)
        to_host = func is _COPIES[0] and kwargs.get("device") is not None and not made_there
        if func in _READS or to_host or (func is _COPIES[1] and not isinstance(args[0], There)):
            self._note()
        if func not in _COPIES:
            self._check(func, args, tensors, there)
        own = {id(item.here): item for item in there}
        if "device" in kwargs:
            kwargs["device"] = None
        result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if to_host or (func is _COPIES[1] and not isinstance(args[0], There)):
            return args[0] if func is _COPIES[1] else result

        def back(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            return own[id(item)] if id(item) in own else There(item)

        return tree_map(back, result)

    def _check(self, func: Any, args: Any, tensors: Sequence[torch.Tensor], there: Sequence[There]) -> None:
        if "_fused_" in func.__name__:
            _check_fused(func, args)
        for item in tensors:
            if there and not isinstance(item, There) and item.dim() > 0:
                raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU ({tuple(item.shape)})")

    def _note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
        self.syncs.append(f"{frames[-1].name}" if frames else "the test")


def _check_fused(func: Any, lists: Sequence[Any]) -> None:
    """Refuse what a fused optimizer's kernel on CUDA cannot take, or would read wrong.

    Each parameter, its gradient and state have one device, dtype and strides (`check_fast_path_restrictions`
    in ATen/native/ForeachUtils.h); the kernel reads step counts by their device addresses.
    """
    for together in zip(*(item for item in lists if isinstance(item, list) and item), strict=True):
        for item in together:
            if not isinstance(item, There):
                raise RuntimeError(f"{func}: a tensor of shape {tuple(item.shape)} is not on {DEVICE}")
        kinds = {
            (item.dtype, *(s for s, n in zip(item.stride(), item.shape, strict=True) if n != 1))
            for item in together
            if item.dim() > 0
        }
        if len(kinds) > 1:
            raise RuntimeError(
                f"{func}: params, grads and state must have same dtype, device, and layout: {kinds}"
            )


def _here(item: Any) -> Any:
    return item.here if isinstance(item, There) else item
