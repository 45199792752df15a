"""The model's buffers: which of them a body has moved, how to put them back, and how members combine them.

The average by samples is for running statistics of norm layers. For all else (a queue of keys, a codebook,
counters) it would make up values that no process has computed, so the first member's count, unless the
script says another rule.

`_version` tells of changes in place. BatchNorm's kernels are an exception: they write the running statistics
without moving their version (measured), so the buffers of a norm layer in training mode always count as
moved.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from springtide.comm.combine import Combined, Packing, Rule, is_floating
from springtide.comm.layout import Field, field_of
from springtide.errors import UsageError

_VERSION = operator.attrgetter("_version")
_PLACE = torch.Tensor.data_ptr
_COUNTING = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)
"""Forward passes that move `num_batches_tracked` with every batch that they take statistics of."""


@dataclass(frozen=True, slots=True)
class _Way:
    """The way of flat values into buffers, found once for many steps.

    Attributes:
        packing: by which the values came.
        training: by norm layer, whether it trains.
        places: addresses of the buffers.
        rooms: flat tensors like the values.
        there: the rooms, cut like the buffers.
        ours: what is written into, in the order of `there`.
    """

    packing: Packing
    training: list[bool]
    places: list[int]
    rooms: list[torch.Tensor]
    there: list[torch.Tensor]
    ours: list[torch.Tensor]


class Buffers:
    """Copies of all buffers as of the last `remember`.

    Buffers are looked up by name each time: a script may replace them. One that is None may become a tensor
    later; from the step on in which it has, it is one of them (`adopt`).
    """

    def __init__(self, model: torch.nn.Module, rules: Mapping[str, Rule] | None = None) -> None:
        """rules: by name, or by the end of a name; see `rule_of`. Raise UsageError for a name of none."""
        self._given = dict(rules or {})
        self._device = next((item.device for item in model.parameters()), torch.device("cpu"))
        self._places: list[tuple[torch.nn.Module, str]] = []
        self._norms: list[_NormBase | None] = []
        """The norm layer that has each buffer."""
        self._layers: list[_NormBase] = []
        """All norm layers that have buffers, once each."""
        self._tells = True
        """Whether a forward pass that writes buffers moves at least one version."""
        self._late: dict[str, tuple[torch.nn.Module, str]] = {}
        self._adopted: dict[str, None] = {}
        self.names: list[str] = []
        self.rules: list[Rule] = []
        """Rules by buffer."""
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is None:
                    self._late[full] = module, name
                elif id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._add(full, module, name, buffer)
        self._check_given()
        self._copies = [buffer.detach().clone() for buffer in self.current()]
        self._seen: list[torch.Tensor] = []
        self._versions: list[int] = []
        """Versions of the tensors in `_seen`, taken when those were noted."""
        self._trained: list[bool] = []
        self._taken: tuple[list[torch.Tensor], list[int], Mapping[int, torch.Tensor]] | None = None
        """Left by the last `take`: all buffers, their versions, and the values it has written, by number."""
        self._fresh: Combined | None = None
        """Values that stand for copies, and are not among these yet."""
        self._way: _Way | None = None
        self._note()

    def _add(self, full: str, module: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
        self._places.append((module, name))
        norm = module if isinstance(module, _NormBase) else None
        self._norms.append(norm)
        if norm is not None and norm not in self._layers:
            self._layers.append(norm)
        counts = type(module).forward in _COUNTING and isinstance(
            module._buffers.get("num_batches_tracked"), torch.Tensor
        )
        self._tells = self._tells and (norm is None or counts)
        self.names.append(full)
        self.rules.append(rule_of(full, module, buffer, self._given))

    def _check_given(self) -> None:
        known = [*self.names, *self._late]
        for wanted in self._given:
            if not any(_ends(name, wanted) for name in known):
                raise UsageError(
                    f"distribute(buffers=): the model has no buffer {wanted!r}; it has "
                    f"{', '.join(known) or 'none'}"
                )

    @property
    def awaited(self) -> list[str]:
        """Names of those that are None for all members, in the model's order."""
        return list(self._late)

    @property
    def adopted(self) -> list[str]:
        """Names of those that were awaited, and are there now."""
        return list(self._adopted)

    @property
    def arrived(self) -> bool:
        """Whether one of those has become a tensor here."""
        return any(module._buffers.get(name) is not None for module, name in self._late.values())

    def awaited_value(self, full: str) -> torch.Tensor | None:
        """Return the present value of an awaited buffer; None while the module has none."""
        module, name = self._late[full]
        return module._buffers.get(name)

    def adopt(self, full: str, value: torch.Tensor) -> None:
        """Take a tensor for an awaited buffer from now on, for all members.

        Args:
            full: name of the buffer in the model.
            value: its first value.
        """
        module, name = self._late.pop(full)
        own = module._buffers.get(name)
        if own is None:
            value = value.to(self._device)
        if own is None or own.shape != value.shape or own.dtype != value.dtype:
            module._buffers[name] = own = value
        elif own is not value:
            with torch.no_grad():
                own.copy_(value)
        self._add(full, module, name, own)
        self._adopted[full] = None
        self.committed.append(own.detach().clone())
        self._note()

    def forget(self, full: str) -> None:
        """The buffer, once adopted, is None again."""
        index = self.names.index(full)
        module, name = self._places.pop(index)
        del self.names[index], self.rules[index], self.committed[index], self._norms[index]
        module._buffers[name] = None
        self._late[full] = module, name
        del self._adopted[full]
        self._note()

    def current(self) -> list[torch.Tensor]:
        """The buffers themselves, in the order of `names`. Raise KeyError if the script removed one."""
        found: list[torch.Tensor | None] = [module._buffers.get(name) for module, name in self._places]
        kept = [buffer for buffer in found if buffer is not None]
        if len(kept) < len(found):
            full = next(name for name, buffer in zip(self.names, found, strict=True) if buffer is None)
            raise KeyError(f"the model's buffer {full} is gone; buffers may change, but not disappear")
        return kept

    @property
    def fields(self) -> list[Field]:
        """Names, shapes and types, which all workers have to agree on."""
        return [field_of(name, item) for name, item in zip(self.names, self.current(), strict=True)]

    @property
    def committed(self) -> list[torch.Tensor]:
        """The copies, in the order of `names`."""
        self._settle()
        return self._copies

    def _settle(self) -> None:
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            for index, value in fresh.items():
                self._copies[index] = value

    def shared(self, values: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return those that are equal on all members between two steps, by name.

        Args:
            values: of all buffers, in the order of `names`.
        """
        both = zip(self.names, values, self.rules, strict=True)
        return [(name, value) for name, value, rule in both if rule is not Rule.LOCAL]

    def copies(self, indices: list[int]) -> dict[int, torch.Tensor]:
        """Return a copy of each of these buffers, by index. Raise UsageError if shape or type differ from
        then.
        """
        found, current = {}, self.current()
        for index in indices:
            buffer, committed = current[index], self.committed[index]
            if buffer.shape != committed.shape or buffer.dtype != committed.dtype:
                raise UsageError(
                    f"the model's buffer {self.names[index]} was {tuple(committed.shape)} {committed.dtype} "
                    f"and is {tuple(buffer.shape)} {buffer.dtype} now: in exact mode buffers keep their shape"
                )
            found[index] = buffer.detach().clone()
        return found

    def copies_of_moved(self) -> dict[int, torch.Tensor]:
        """Return a copy of each buffer that may differ from the remembered one, by index."""
        buffers = self.current()
        return {
            index: buffers[index].detach().clone()
            for index, has_moved in enumerate(self._moved_of(buffers))
            if has_moved
        }

    def moved(self) -> list[bool]:
        """Return for each buffer whether it may differ from its copy."""
        return self._moved_of(self.current())

    def _moved_of(self, buffers: list[torch.Tensor]) -> list[bool]:
        return [
            trained or now is not seen or now._version != version or (norm is not None and norm.training)
            for now, seen, version, trained, norm in zip(
                buffers, self._seen, self._versions, self._trained, self._norms, strict=True
            )
        ]

    def remember(self) -> None:
        """Refresh the copies of what moved."""
        buffers = self.current()
        kept = self._kept_values(buffers)
        if isinstance(kept, Combined):
            if self._fresh is not None and self._fresh.way is not kept.way:
                self._settle()
            self._fresh = kept  # in the place of those of the step before, of the same buffers
        else:
            copies = self.committed
            for index, value in kept.items():
                copies[index] = value
        if len(kept) < len(buffers):
            self._refresh(buffers, kept)
        versions = self._taken[1] if kept and self._taken is not None else None
        self._note(buffers, versions)

    def _kept_values(self, buffers: list[torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return by number what `take` was given, of the buffers that still hold it."""
        if self._taken is None or not self._tells:
            return {}
        taken, versions, values = self._taken
        # All or none: statistics move silently, but then the layer's own counter moves too.
        same = all(map(operator.is_, buffers, taken)) and list(map(_VERSION, buffers)) == versions
        return values if same else {}

    def _refresh(self, buffers: list[torch.Tensor], known: Collection[int]) -> None:
        kept, moving, copied = [], [], set(known)
        for index, moved in enumerate(self._moved_of(buffers)):
            if moved and index not in copied:
                buffer, copy = buffers[index], self.committed[index]
                if copy.shape == buffer.shape and copy.dtype == buffer.dtype:
                    kept.append(copy)
                    moving.append(buffer)
                else:
                    self.committed[index] = buffer.detach().clone()
        if kept:
            with torch.no_grad():
                torch._foreach_copy_(kept, moving)

    def take(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace buffers by what all members have made of them in this step, in place.

        Args:
            values: by buffer's number; like the buffer in shape and dtype. Nobody may write into them: once
                the step is committed, they are the copies.
        """
        if not values:
            return
        buffers = self.current()
        if isinstance(values, Combined) and values.way.is_plain:
            self._take_flat(values, [buffers[index] for index in values.indices])
            self._taken = buffers, list(map(_VERSION, buffers)), values
            return
        ours, theirs, there = [], [], {}
        with torch.no_grad():
            for index, value in values.items():
                buffer = self._to_write(index, buffers[index])
                if value.device != buffer.device:
                    buffer.copy_(value)
                    continue
                ours.append(buffer)
                theirs.append(value)
                if value.is_cpu:
                    there[index] = value
            if ours:
                torch._foreach_copy_(ours, theirs)
        self._taken = buffers, list(map(_VERSION, buffers)), there

    def _take_flat(self, values: Combined, buffers: list[torch.Tensor]) -> None:
        """Write values that lie side by side.

        Args:
            values: new ones.
            buffers: the tensors that they are for, in the order of their numbers.
        """
        way = self._way
        training = [layer.training for layer in self._layers]
        places = list(map(_PLACE, buffers))  # a script may give a tensor other memory
        known = way is not None and way.packing is values.way and 0 not in places
        if way is None or not known or way.training != training or way.places != places:
            rooms = values.way.rooms()
            ours = [
                self._to_write(index, buffer) for index, buffer in zip(values.indices, buffers, strict=True)
            ]
            self._way = way = _Way(values.way, training, places, rooms, values.way.split(rooms), ours)
        with torch.no_grad():
            for room, flat in zip(way.rooms, values.flats, strict=True):
                room.copy_(flat)
            torch._foreach_copy_(way.ours, way.there)

    def _to_write(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Return what to write into for a buffer: another tensor on its memory where a norm layer trains, so
        that its version stays. Backward asks for the version of statistics, and takes none of them: a GAN's
        generator has its backward after the critic's step.

        Args:
            index: the buffer's number.
            buffer: the present one.
        """
        norm = self._norms[index]
        return buffer.data if norm is not None and norm.training else buffer

    def put_back(self) -> None:
        """Copy the remembered values into what moved."""
        self.write([index for index, moved in enumerate(self.moved()) if moved], self.committed)
        for module, name in self._late.values():
            module._buffers[name] = None
        self._note()

    def write(self, indices: list[int], values: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> None:
        """Replace buffers in place; a buffer of another shape is replaced as an object.

        Args:
            indices: numbers of the buffers.
            values: by the buffer's number.
        """
        ours, theirs = [], []
        with torch.no_grad():
            for index in indices:
                module, name = self._places[index]
                buffer, value = module._buffers[name], values[index]
                if buffer is not None and is_same_memory(buffer, value):
                    torch.autograd.graph.increment_version(buffer)  # it has come in place
                elif buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                    where = value.device if buffer is None else buffer.device
                    module._buffers[name] = value.detach().to(where, copy=True)
                elif buffer.device != value.device:
                    buffer.copy_(value)
                else:
                    ours.append(buffer)
                    theirs.append(value)
            if ours:
                torch._foreach_copy_(ours, theirs)

    def _note(self, buffers: list[torch.Tensor] | None = None, versions: list[int] | None = None) -> None:
        self._seen = self.current() if buffers is None else buffers
        self._versions = list(map(_VERSION, self._seen)) if versions is None else versions
        self._trained = [norm is not None and norm.training for norm in self._norms]
        self._taken = None


def rule_of(
    full: str, module: torch.nn.Module, buffer: torch.Tensor, given: Mapping[str, Rule] | None = None
) -> Rule:
    """Return the rule that was given for the buffer (the longest name wins), or the one that fits it.

    Args:
        full: name of the buffer in the model.
        module: that has it.
        buffer: its value.
        given: rules by name, or by the end of a name.

    Raises:
        UsageError: the mean of integers is asked for.
    """
    named = [wanted for wanted in given or {} if _ends(full, wanted)]
    if given and named:
        rule = given[max(named, key=len)]
        if rule is Rule.MEAN and not is_floating(buffer):
            raise UsageError(
                f"distribute(buffers=): {full} holds {buffer.dtype}, of which there is no mean: use first, "
                "sum, min, max or local"
            )
        return rule
    statistic = isinstance(module, _NormBase) or full.endswith(("running_mean", "running_var"))
    return Rule.MEAN if statistic and is_floating(buffer) else Rule.FIRST


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both show the same memory in the same way.

    A tensor that only wraps others has an address of 0, as all of its kind.

    Args:
        one: a tensor.
        other: another one.
    """
    return (
        (one.device, one.dtype, one.shape, one.stride())
        == (other.device, other.dtype, other.shape, other.stride())
        and one.numel() > 0
        and 0 != one.data_ptr() == other.data_ptr()
    )


def _ends(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith(f".{wanted}")
