"""The committed state as a tree: what a joiner needs to go on as if it had always been there."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.errors import SpringtideError
from springtide.memory.ready import ReadyMemory
from springtide.pods.tensors import as_dtensor, is_dtensor, is_sharded_alike, local_shard
from springtide.train_step.buffers import Buffers, is_same_memory
from springtide.train_step.master_weights import check_wanted

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Position:
    """The part of a committed state that is no tensor.

    Attributes:
        productive_seconds: time spent on steps that survive.
        began_unix: unix seconds at which the first began.
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


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Memory for a tensor of a state.

    live: the script sees it; otherwise it is new, and `State.write` makes it part of the state.
    """

    tensor: torch.Tensor
    live: bool


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
        remote: Collection[str] = (),
        masters: bool = False,
        grouped: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        """Make it for one script.

        Args:
            parameters: by name; all of them, but those that only servers hold.
            buffers: of the model.
            optimizers: in the script's order.
            tracked: other objects with `state_dict` and `load_state_dict`, by name.
            saved_as: of `names_in_state_dict`.
            remote: those of `tracked` that talk to servers: their errors are not this process's.
            masters: the script has asked for float32 masters of 16-bit parameters.
            grouped: all that groups of optimizers may have, by name; None: `parameters`.
        """
        self._masters = masters
        self._parameters = parameters
        self._grouped = parameters if grouped is None else grouped
        self._names = {id(parameter): name for name, parameter in self._grouped.items()}
        self._remote = remote
        self._saved_as = dict(saved_as or {})
        self._buffers = buffers
        self._optimizers = optimizers
        self._tracked = tracked
        self.ready = ReadyMemory()
        """Functions that take in optimizers' state when it is received."""
        self._frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]

    def size_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = [*self._parameters.values(), *self._buffers.current()]
        return sum(local_shard(tensor).numel() * tensor.element_size() for tensor in tensors)

    def read(self, position: Position, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as a tree; its tensors share memory with the live ones, so send it before anything
        changes.

        Args:
            position: of the committed state.
            plan: fingerprint of the training loop, which the receiver compares with its own.
        """
        return {
            "format": FORMAT,
            "parameters": {name: local_shard(item.detach()) for name, item in self._parameters.items()},
            "frozen": self._frozen,  # when the script distributed them; checkpoints save them once
            "buffers": dict(zip(self._buffers.names, self._buffers.current(), strict=True)),
            "saved_as": self._saved_as,
            "optimizer": {
                "kinds": self._kinds(),
                "state": [self._own_state(optimizer, parameter) for optimizer, parameter in self._in_order()],
                "groups": [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in self._groups()
                ],
                "members": self._members(),
                "on_host": self._on_host(),
            },
            "tracked": {name: self._tracked_state(name) for name in self._tracked},
            "cursor": position.cursor.to_json(),
            "ledger": position.ledger.to_json(),
            "productive_seconds": position.productive_seconds,
            "began_unix": position.began_unix,
            "plan": dict(plan),
        }

    def _own_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
        """Return an optimizer's state of a parameter; of what is divided, the parts that are here."""
        found = dict(optimizer.state.get(parameter, {}))
        for name, value in found.items():
            if is_dtensor(value):
                if not is_sharded_alike(value, parameter):
                    whose = self._names.get(id(parameter), "a parameter")
                    raise SpringtideError(
                        f"the optimizer's {name} of {whose} is divided in another way than the parameter, so "
                        "it cannot be transferred or saved: use an optimizer whose state has the parameters' "
                        "shapes (SGD, Adam, AdamW)"
                    )
                found[name] = local_shard(value)
        return found

    def divided(self, tree: Mapping[str, Any], *, whole: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors of a tree that stand for parameters, or optimizers' state, that are divided.

        Args:
            tree: of `read`, or of a checkpoint's outline.
            whole: its tensors have the shapes of the whole ones; otherwise, of this process's parts.

        Returns:
            (tensor of the tree, parameter that is divided in the same way) of each.
        """

        def fits(value: Any, parameter: torch.Tensor) -> bool:
            shape = parameter.shape if whole else local_shard(parameter).shape
            return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == shape

        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in self._parameters.items():
            value = tree["parameters"].get(name)
            if is_dtensor(parameter) and fits(value, parameter):
                found.append((value, parameter))
        states = iter(tree["optimizer"]["state"])
        for _, parameters in self._groups_of(tree["optimizer"]):
            for parameter in parameters:
                values = next(states)
                if is_dtensor(parameter):
                    found += [(value, parameter) for value in values.values() if fits(value, parameter)]
        return found

    def _tracked_state(self, name: str) -> Any:
        try:
            return self._tracked[name].state_dict()
        except Exception as error:
            if name in self._remote:
                raise
            raise SpringtideError(
                f"the tracked object {name!r} of this worker does not give its state: "
                f"{type(error).__name__}: {error}"
            ) from error

    def check(self, tree: Mapping[str, Any]) -> Position:
        """Check that a tree fits this process's script, and return its position.

        Raise SpringtideError when it does not fit.
        """
        if tree.get("format") != FORMAT:
            raise SpringtideError(
                f"the job's state has format {tree.get('format')!r}, this worker reads format {FORMAT}: run "
                "one version of springtide in all workers of a job"
            )
        ours: dict[str, torch.Tensor] = {name: local_shard(item) for name, item in self._parameters.items()}
        _same_tensors("parameter", ours, tree["parameters"])
        # What was None when the script began may be a tensor in the job's state, or not yet.
        late = {*self._buffers.awaited, *self._buffers.adopted}
        own = dict(zip(self._buffers.names, self._buffers.current(), strict=True))
        _same_tensors(
            "buffer",
            {name: item for name, item in own.items() if name not in late},
            {name: item for name, item in tree["buffers"].items() if name not in late},
            shapes=False,
        )
        # Checkpoints of earlier builds do not say.
        kinds = tree["optimizer"].get("kinds", self._kinds())
        if kinds != self._kinds():
            raise SpringtideError(
                f"the job's optimizer is {' and '.join(kinds)} and this worker's "
                f"{' and '.join(self._kinds())}: is the script the same?"
            )
        self._check_groups(tree["optimizer"])
        check_wanted(tree["optimizer"]["state"], self._masters)
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

    def places(self, tree: Mapping[str, Any]) -> dict[int, TensorPlace]:
        """Return where the tensors of a state that is on its way may be received, by their ids.

        Parameters, buffers, and state that the optimizers and tracked modules have already, are received
        where they are; optimizers' state that is missing in new memory. All else (options of groups, state of
        tracked objects that may keep what they are given) has no place.

        Args:
            tree: an outline that `check` has accepted.
        """
        found: dict[int, TensorPlace] = {}

        def place(value: Any, own: Any) -> None:
            if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
                return
            own = local_shard(own)
            if (own.shape, own.dtype) == (value.shape, value.dtype):
                found.setdefault(id(value), TensorPlace(own.detach(), live=True))

        for name, parameter in self._parameters.items():
            place(tree["parameters"][name], parameter)
        for name, buffer in zip(self._buffers.names, self._buffers.current(), strict=True):
            place(tree["buffers"].get(name), buffer)
        optimizers = tree["optimizer"]
        for optimizer, parameter, placement, values in self._placed(
            optimizers, self._groups_of(optimizers), give=True
        ):
            state = optimizer.state.get(parameter, {})
            for name, value in values.items():
                place(value, state.get(name))
                # Numbers are small, and `write` has rules for them.
                if isinstance(value, torch.Tensor) and value.dim() and id(value) not in found:
                    found[id(value)] = TensorPlace(placement.room(name, value), live=False)
        for name, item in self._tracked.items():
            # A module copies in place. Other objects may share what they show with the script.
            values = tree["tracked"][name]
            if isinstance(item, torch.nn.Module) and isinstance(values, Mapping):
                own = item.state_dict()
                for key, value in values.items():
                    place(value, own.get(key))
        return found

    def write(self, tree: Mapping[str, Any], *, give: bool = False) -> None:
        """Make the live state equal to the tree, which `check` has accepted.

        Args:
            tree: of `read`, here or in another process; its tensors are on the CPU, or where `places` said.
            give: nobody uses the tree afterwards, so that tensors with memory of their own need no copy:
                taking new memory for a large optimizer's state costs more than reading it.

        Raises:
            SpringtideError: something in this process did not take it: the model, an optimizer, or a tracked
                object of the script's. The live state is then a mixture, so the process must not go on.
            RuntimeError: servers failed.
        """
        try:
            with torch.no_grad():
                self._write_tensors(tree)
                self._write_optimizers(tree["optimizer"], give)
        except Exception as error:  # whatever it is, it is this process's own
            raise _not_installed("the model and its optimizers", error) from error
        live = self._live()
        for name, item in self._tracked.items():
            try:
                item.load_state_dict(_with_own_memory(tree["tracked"][name], live))
            except Exception as error:
                if name in self._remote:
                    raise
                raise _not_installed(f"the tracked object {name!r}", error) from error
        self._buffers.remember()

    def _write_tensors(self, tree: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            _copy(local_shard(parameter), tree["parameters"][name])
            parameter.grad = None
        for name in self._buffers.adopted:
            if name not in tree["buffers"]:
                self._buffers.forget(name)
        for name in [name for name in tree["buffers"] if name in self._buffers.awaited]:
            self._buffers.adopt(name, tree["buffers"][name].clone())
        self._buffers.write(
            list(range(len(self._buffers.names))), [tree["buffers"][name] for name in self._buffers.names]
        )

    def _write_optimizers(self, tree: Mapping[str, Any], give: bool) -> None:
        if (members := tree.get("members", self._members())) != self._members():
            self._regroup(members)
        live = self._live()
        for group, values in zip(self._groups(), tree["groups"], strict=True):
            _write_options(group, values, live)
        for optimizer, parameter, placement, state in self._placed(tree, self._groups_here(), give):
            _write_parameter_state(optimizer, parameter, state, placement)

    def _groups_here(self) -> list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
        return [
            (optimizer, group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups
        ]

    def _groups_of(
        self, tree: Mapping[str, Any]
    ) -> list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
        """Return the groups as they will be when the tree has been written."""
        members = tree.get("members")
        if members is None or members == self._members():
            return self._groups_here()
        return [
            (optimizer, [self._grouped[name] for name in names])
            for optimizer, groups in zip(self._optimizers, members, strict=True)
            for names in groups
        ]

    def _placed(
        self,
        tree: Mapping[str, Any],
        groups: Sequence[tuple[torch.optim.Optimizer, Sequence[torch.nn.Parameter]]],
        give: bool,
    ) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter, _Placement, Mapping[str, Any]]]:
        """Yield where the optimizers' state of each parameter goes, and that state, in the tree's order."""
        on_host, states, live = tree.get("on_host"), iter(tree["state"]), self._live()
        for number, (optimizer, parameters) in enumerate(groups):
            hosted = None if on_host is None else on_host[number]
            for parameter in parameters:
                own, options = local_shard(parameter), tree["groups"][number]
                placement = _Placement(own, options, hosted, give, live, self.ready)
                yield optimizer, parameter, placement, next(states)

    def _live(self) -> frozenset[int]:
        """Return where the memory of parameters and buffers begins."""
        tensors = [*self._parameters.values(), *self._buffers.current()]
        return frozenset(local_shard(tensor).untyped_storage().data_ptr() for tensor in tensors)

    def _members(self) -> list[list[list[str]]]:
        """Return the names of the parameters, by optimizer and group."""
        return [
            [[self._names.get(id(item), "") for item in group["params"]] for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def _on_host(self) -> list[list[str]] | None:
        """Return, by group, which state tensors are on the CPU though their parameters are on a device.

        Adam's `step` is, unless it is `fused` or `capturable`. None where parameters are on the CPU.
        """
        if all(parameter.device.type == "cpu" for parameter in self._parameters.values()):
            return None
        found = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                states = [optimizer.state.get(item, {}) for item in group["params"]]
                names = {name for state in states for name, value in state.items() if _any_on_cpu(value)}
                found.append(sorted(names))
        return found

    def _check_groups(self, optimizer: Mapping[str, Any]) -> None:
        """Raise SpringtideError when the job's parameter groups cannot be made of this worker's."""
        members, states = optimizer.get("members"), optimizer["state"]
        if members is None:  # of an earlier build: as many groups, of as many parameters
            fits = len(optimizer["groups"]) == len(self._groups()) and len(states) == len(self._in_order())
        else:
            named = [name for groups in members for group in groups for name in group]
            fits = (
                len(members) == len(self._optimizers)
                and sum(map(len, members)) == len(optimizer["groups"])
                and len(named) == len(states)
                and (members == self._members() or set(named) <= set(self._grouped))
            )
        if not fits:
            raise SpringtideError(
                "the job's optimizer has other parameter groups than this worker's: is the script the same?"
            )

    def _regroup(self, members: Sequence[Sequence[Sequence[str]]]) -> None:
        """Give the optimizers the groups that the job's have: a script may add some while it trains."""
        for optimizer, groups in zip(self._optimizers, members, strict=True):
            own = optimizer.param_groups
            added = len(groups) - len(own)
            for number, names in enumerate(groups):
                parameters = [self._grouped[name] for name in names]
                if number < len(own):
                    own[number]["params"] = parameters
                else:
                    own.append({**own[0], "params": parameters})
            del own[len(groups) :]
            if added > 0:
                _expect_groups(optimizer, own[-added:])
            kept = {id(item) for group in own for item in group["params"]}
            for parameter in [item for item in optimizer.state if id(item) not in kept]:
                del optimizer.state[parameter]

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._optimizers]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def positions(self, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return the positions in the tree of these parameters' optimizer state, by the parameter's number
        here.
        """
        order = {id(parameter): position for position, (_, parameter) in enumerate(self._in_order())}
        return {n: order[id(item)] for n, item in enumerate(parameters) if id(item) in order}

    def positions_in(self, tree: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return as `positions` does where the state of these parameters is in another state's tree, whose
        optimizers may have more groups, or other ones.

        Args:
            tree: of the state.
            parameters: of this process.
        """
        members = tree["optimizer"].get("members")
        if members is None:
            return self.positions(parameters)
        named = [name for groups in members for group in groups for name in group]
        order = {name: position for position, name in enumerate(named)}
        names = [self._names.get(id(item), "") for item in parameters]
        return {number: order[name] for number, name in enumerate(names) if name in order}

    def _in_order(self) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
        return [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]


def _expect_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Have the script find these groups there where it adds them itself, as the other members' did before.

    A worker that joins later skips the loops that are over, and does what stands between them.
    """

    def members(group: Mapping[str, Any]) -> frozenset[int]:
        return frozenset(id(item) for item in group["params"])

    expected = {members(group) for group in groups}

    def add_param_group(group: dict[str, Any]) -> None:
        parameters = group["params"]
        group["params"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        found = members(group)
        # A later state may have taken it away again.
        is_there = found in expected and any(members(known) == found for known in optimizer.param_groups)
        expected.discard(found)
        if not expected:
            optimizer.__dict__.pop("add_param_group", None)
        if not is_there:
            type(optimizer).add_param_group(optimizer, group)

    optimizer.__dict__["add_param_group"] = add_param_group


@dataclass(frozen=True)
class _Placement:
    """The destination of one parameter's state: its device, and the parameter's strides.

    The parameter is this process's part of it where it is divided.

    Attributes:
        on_host: names of state that stays on the CPU, as the sender had it; None: torch's rule.
        live: where memory begins that is another part of the state.
        ready: has memory for what is received.
    """

    parameter: torch.Tensor
    group: Mapping[str, Any]
    on_host: Collection[str] | None
    give: bool
    live: Collection[int] = ()
    ready: ReadyMemory | None = None

    def room(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return new memory for the value, as `place` would have it."""
        device = self.device(name, value)
        if value.shape == self.parameter.shape:
            here = self.ready if device == self.parameter.device else None
            made = None if here is None else here.take(self.parameter, value.dtype)
            if made is not None:
                return made
            return torch.empty_like(self.parameter, dtype=value.dtype, device=device, requires_grad=False)
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    def device(self, name: str, value: torch.Tensor) -> torch.device:
        if self.on_host is not None:
            return torch.device("cpu") if name in self.on_host else self.parameter.device
        if value.dim() == 0 and not (self.group.get("fused") or self.group.get("capturable")):
            return torch.device("cpu")  # as `_init_group` of torch's optimizers makes step counts
        return self.parameter.device

    def place(self, name: str, value: Any) -> Any:
        """Return the value in memory of its own, on the right device, with all that is inside of it."""
        if isinstance(value, dict):
            return {key: self.place(name, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.place(name, item) for item in value])
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        device = self.device(name, value)
        if value.shape == self.parameter.shape and value.stride() != self.parameter.stride():
            # Fused kernels walk through raw memory: the state must lie as the parameter does.
            return torch.empty_like(self.parameter, dtype=value.dtype, device=device).copy_(value)
        if value.dim() == 0:
            return value.to(device, copy=True)
        return value.to(device, copy=not (self.give and _has_own_memory(value, self.live)))


def _write_parameter_state(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    values: Mapping[str, Any],
    placement: _Placement,
) -> None:
    if not values:
        optimizer.state.pop(parameter, None)
        return
    state = optimizer.state[parameter]
    for name in set(state) - set(values):
        del state[name]
    for name, value in values.items():
        old = state.get(name)
        old = local_shard(old) if isinstance(old, torch.Tensor) else old
        if (
            isinstance(value, torch.Tensor)
            and isinstance(old, torch.Tensor)
            and (old.shape, old.dtype) == (value.shape, value.dtype)
        ):
            _copy(old, value)
        else:
            placed = placement.place(name, value)
            is_part = (
                isinstance(placed, torch.Tensor)
                and placed.dim()
                and placed.shape == placement.parameter.shape
            )
            state[name] = as_dtensor(placed, parameter) if is_part else placed


def _write_options(group: dict[str, Any], values: Mapping[str, Any], live: Collection[int]) -> None:
    """Take over a group's options; a tensor (a learning rate) stays the object that the script may hold."""
    for name, value in values.items():
        old = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            group[name] = _with_own_memory(value, live)


def _with_own_memory(value: Any, live: Collection[int]) -> Any:
    """Return the value with copies of tensors that are views, or are another part of the live state.

    A view would keep the whole that it is a part of, such as a transfer's memory.
    """
    if isinstance(value, torch.Tensor):
        return value if _has_own_memory(value, live) else value.clone()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _with_own_memory(item, live)
    elif isinstance(value, list):
        value[:] = [_with_own_memory(item, live) for item in value]
    elif type(value) is tuple:
        return tuple(_with_own_memory(item, live) for item in value)
    return value


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the value in place, unless it has come into the target's memory already."""
    if is_same_memory(target, value):
        torch.autograd.graph.increment_version(target)  # what looks whether it changed
    else:
        target.copy_(value)


def _any_on_cpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    if isinstance(value, dict):
        return any(_any_on_cpu(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_any_on_cpu(item) for item in value)


def _not_installed(where: str, error: Exception) -> SpringtideError:
    return SpringtideError(
        f"{where} of this worker did not take the job's state, which had arrived whole: "
        f"{type(error).__name__}: {error}. This worker ends; the others go on"
    )


def _has_own_memory(tensor: torch.Tensor, live: Collection[int] = ()) -> bool:
    """Whether it is no view into something larger, and its memory does not begin at one of these places."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return whole and (not tensor.numel() or storage.data_ptr() not in live)


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
