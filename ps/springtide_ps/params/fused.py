"""One step of a torch optimizer with little around its kernel. PURE.

`Optimizer.step` sorts tensors by device and dtype and asks for hooks, profilers and compilers, anew for every
chunk; right after a chunk has gone through the caches, that takes a third as long as the fused kernel on 4
MiB. Here the optimizer keeps its options and its state, called as in a `state_dict`, and the same kernel is
called on them. Everything out of the ordinary (the first step, a tensor without a gradient, an optimizer
without a fused kernel) goes through the optimizer's own step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

_Tensors = list[torch.Tensor]
_States = list[dict[str, Any]]


def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that does `optimizer.step()`, with the same results, where no hooks are and nothing
    is profiled.

    All tensors of a parameter group have one dtype, are dense, on the CPU, and need no gradient themselves.
    Their gradients may be taken away.
    """
    whole = inspect.unwrap(type(optimizer).step)
    kernel = _KERNELS.get(_kind(optimizer))

    def step() -> None:
        ready = kernel and _ready(optimizer)
        if not ready or kernel is None:
            if kernel is _sgd:
                _begin_apart(optimizer)
            whole(optimizer)
            return
        for group, tensors, gradients, states in ready:
            kernel(group, tensors, gradients, states)

    return step


def leaves_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps read gradients and do not change them, also the first one."""
    return _kind(optimizer) in _KERNELS and all(group.get("fused") for group in optimizer.param_groups)


def without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, whose making does not import torch's compiler.

    The first `add_param_group` of a process does, which takes as long as the import of torch itself: a server
    that replaces a lost one would answer as much later.
    """
    return type(kind.__name__, (kind,), {"add_param_group": inspect.unwrap(kind.add_param_group)})


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """torch's own class of what may be one `without_compiler`."""
    return next((kind for kind in type(optimizer).__mro__ if kind in _KERNELS), type(optimizer))


def _ready(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], _Tensors, _Tensors, _States]]:
    """Return the fused kernel's arguments by parameter group if every tensor has a gradient and a whole
    state; else none.
    """
    wanted = _STATES[_kind(optimizer)]
    ready = []
    for group in optimizer.param_groups:
        tensors = group["params"]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        names = wanted(group)
        states = [optimizer.state[tensor] for tensor in tensors] if names else []
        complete = all(state.get(name) is not None for state in states for name in names)
        if len(gradients) < len(tensors) or not complete or not group.get("fused"):
            return []
        ready.append((group, tensors, gradients, states))
    return ready


def _begin_apart(optimizer: torch.optim.Optimizer) -> None:
    """Make the step of tensors that have no momentum yet, where others of their group have one.

    torch's fused SGD begins the momentum of all tensors that have a gradient, or fails; without the kernel it
    begins each one's with its first gradient.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
        fresh = [t for t in tensors if optimizer.state.get(t, {}).get("momentum_buffer") is None]
        if not 0 < len(fresh) < len(tensors):
            continue
        for tensor in fresh:
            optimizer.state[tensor]["momentum_buffer"] = torch.empty_like(tensor)
        gradients = [tensor.grad for tensor in fresh]
        _sgd(group, fresh, gradients, [optimizer.state[tensor] for tensor in fresh], first=True)
        for tensor in fresh:
            tensor.grad = None


def _sgd(
    group: dict[str, Any], tensors: _Tensors, gradients: _Tensors, states: _States, first: bool = False
) -> None:
    torch._fused_sgd_(
        tensors,
        gradients,
        [state["momentum_buffer"] for state in states],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=first,
    )


def _adam(group: dict[str, Any], tensors: _Tensors, gradients: _Tensors, states: _States) -> None:
    _of_adam(torch._fused_adam_, group, tensors, gradients, states)


def _adamw(group: dict[str, Any], tensors: _Tensors, gradients: _Tensors, states: _States) -> None:
    _of_adam(torch._fused_adamw_, group, tensors, gradients, states)


def _of_adam(
    kernel: Callable[..., None],
    group: dict[str, Any],
    tensors: _Tensors,
    gradients: _Tensors,
    states: _States,
) -> None:
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel(
        tensors,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _adagrad(group: dict[str, Any], tensors: _Tensors, gradients: _Tensors, states: _States) -> None:
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adagrad_(
        tensors,
        gradients,
        [state["sum"] for state in states],
        steps,
        lr=group["lr"],
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _names_of_adam(group: dict[str, Any]) -> tuple[str, ...]:
    names = ("step", "exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


_Kernel = Callable[[dict[str, Any], _Tensors, _Tensors, _States], None]
_KERNELS: Final[dict[type[torch.optim.Optimizer], _Kernel]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
}
_STATES: Final[dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], tuple[str, ...]]]] = {
    torch.optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    torch.optim.Adam: _names_of_adam,
    torch.optim.AdamW: _names_of_adam,
    torch.optim.Adagrad: lambda group: ("step", "sum"),
}
"""Parts of a tensor's state once a step was made with it."""
