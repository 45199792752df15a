"""The committed state as a tree: what a joiner needs to go on as if it had always been there."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import SpringtideError
from springtide.train_step.buffers import Buffers

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Position:
    """What is committed besides tensors.

    productive_seconds: time spent on steps that survive. began_unix: unix seconds at which the first began.
    """

    cursor: Cursor
    ledger: Ledger
    productive_seconds: float = 0.0
    began_unix: float = 0.0


def names_in_state_dict(model: torch.nn.Module) -> dict[str, list[str]]:
    """Name in the tree -> names in the model's `state_dict`, where these are not that one name.

    A tensor that stands in several places (tied weights) has several; a buffer that is not persistent none.
    """
    saved: dict[int, list[str]] = {}
    tensors: dict[int, str] = {id(item): name for name, item in model.named_parameters()}
    tensors |= {id(item): name for name, item in model.named_buffers()}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *persistent.items()]:
            saved.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    found = {name: saved.get(key, []) for key, name in tensors.items()}
    return {name: names for name, names in found.items() if names != [name]}


class State:
    """Reads and writes the whole state of one script: parameters, buffers, optimizers, tracked objects.

    Tensors are copied raw: `Optimizer.load_state_dict` would cast the optimizer's state to the parameters'
    type.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        buffers: Buffers,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        saved_as: Mapping[str, list[str]] | None = None,
    ) -> None:
        """saved_as: of `names_in_state_dict`."""
        self._parameters = parameters
        self._saved_as = dict(saved_as or {})
        self._buffers = buffers
        self._optimizers = optimizers
        self._tracked = tracked

    def size_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = [*self._parameters.values(), *self._buffers.current()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def read(self, position: Position, plan: Mapping[str, int]) -> dict[str, Any]:
        """The tree; its tensors share memory with the live ones, so send it before anything changes.

        plan: fingerprint of the training loop, which the receiver compares with its own.
        """
        return {
            "format": FORMAT,
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "buffers": dict(zip(self._buffers.names, self._buffers.current(), strict=True)),
            "saved_as": self._saved_as,
            "optimizer": {
                "kinds": self._kinds(),
                "state": [
                    dict(optimizer.state.get(parameter, {})) for optimizer, parameter in self._in_order()
                ],
                "groups": [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in self._groups()
                ],
            },
            "tracked": {name: item.state_dict() for name, item in self._tracked.items()},
            "cursor": position.cursor.to_json(),
            "ledger": position.ledger.to_json(),
            "productive_seconds": position.productive_seconds,
            "began_unix": position.began_unix,
            "plan": dict(plan),
        }

    def check(self, tree: Mapping[str, Any]) -> Position:
        """What the tree says besides tensors.

        Raise SpringtideError when it does not fit this process's script.
        """
        if tree.get("format") != FORMAT:
            raise SpringtideError(
                f"the job's state has format {tree.get('format')!r}, this worker reads format {FORMAT}: run "
                "one version of springtide in all workers of a job"
            )
        ours: dict[str, torch.Tensor] = dict(self._parameters)
        _same_tensors("parameter", ours, tree["parameters"])
        _same_tensors(
            "buffer",
            dict(zip(self._buffers.names, self._buffers.current(), strict=True)),
            tree["buffers"],
            shapes=False,
        )
        # Checkpoints of earlier builds do not say.
        kinds = tree["optimizer"].get("kinds", self._kinds())
        if kinds != self._kinds():
            raise SpringtideError(
                f"the job's optimizer is {' and '.join(kinds)} and this worker's "
                f"{' and '.join(self._kinds())}: is the script the same?"
            )
        groups, states = tree["optimizer"]["groups"], tree["optimizer"]["state"]
        if len(groups) != len(self._groups()) or len(states) != len(self._in_order()):
            raise SpringtideError(
                "the job's optimizer has other parameter groups than this worker's: is the script the same?"
            )
        if set(tree["tracked"]) != set(self._tracked):
            raise SpringtideError(
                f"the job tracks {sorted(tree['tracked'])} and this worker {sorted(self._tracked)}: is the "
                "script the same?"
            )
        return Position(
            Cursor.from_json(tree["cursor"]),
            Ledger.from_json(tree["ledger"]),
            float(tree["productive_seconds"]),
            float(tree.get("began_unix", 0.0)),
        )

    def write(self, tree: Mapping[str, Any], *, give: bool = False) -> None:
        """Make the live state equal to the tree, which `check` has accepted.

        give: nobody uses the tree afterwards, so that tensors with memory of their own need no copy: taking
        new memory for a large optimizer's state costs more than reading it.
        """
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tree["parameters"][name])
                parameter.grad = None
            self._buffers.write(
                list(range(len(self._buffers.names))), [tree["buffers"][name] for name in self._buffers.names]
            )
            for (optimizer, parameter), state in zip(
                self._in_order(), tree["optimizer"]["state"], strict=True
            ):
                _write_parameter_state(optimizer, parameter, state, give)
        for group, values in zip(self._groups(), tree["optimizer"]["groups"], strict=True):
            group.update(values)
        for name, item in self._tracked.items():
            item.load_state_dict(tree["tracked"][name])
        self._buffers.remember()

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._optimizers]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def positions(self, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
        """Where the optimizer's state of each of these parameters stands in the tree, by its number here."""
        order = {id(parameter): position for position, (_, parameter) in enumerate(self._in_order())}
        return {n: order[id(item)] for n, item in enumerate(parameters) if id(item) in order}

    def _in_order(self) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
        return [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]


def _write_parameter_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, values: Mapping[str, Any], give: bool
) -> None:
    if not values:
        optimizer.state.pop(parameter, None)
        return
    state = optimizer.state[parameter]
    for name in set(state) - set(values):
        del state[name]
    for name, value in values.items():
        old = state.get(name)
        if not isinstance(value, torch.Tensor):
            state[name] = copy.deepcopy(value)
        elif isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype:
            old.copy_(value)
        else:
            # An optimizer that has not stepped yet; scalars such as Adam's step count stay on the CPU.
            if value.dim() == 0:
                state[name] = value.clone()
            else:
                state[name] = value.to(parameter.device, copy=not (give and _has_own_memory(value)))


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether it is no view into something larger, such as the buffer of a transfer."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _same_tensors(
    kind: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], shapes: bool = True
) -> None:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine, other = ours.get(name), theirs.get(name)
        described = [
            "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            for tensor in (mine, other)
        ]
        if mine is None or other is None or (shapes and described[0] != described[1]):
            raise SpringtideError(
                f"{kind} {name} is {described[0]} in this worker and {described[1]} in the job's state: is "
                "the script the same?"
            )
