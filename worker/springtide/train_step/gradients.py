"""The gradients of a model's parameters: which are the library's own, and the averages put in their place."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from springtide.comm.buckets import Buckets
from springtide.errors import UsageError
from springtide.pods.tensors import as_dtensor, is_dtensor, local_shard
from springtide.ps.lazy_values import only_looks
from springtide.train_step.optimizers import parameters_of
from springtide.train_step.repeated_backward import BeforeGradient

_ENGINE: Any = torch.autograd.Variable._execution_engine
_VERSION = operator.attrgetter("_version")
_GRAD = operator.attrgetter("grad")  # with `map`, a third of what a loop takes


def clip_coefficient(most: float, norm: float) -> float:
    """Return the factor that clips gradients to a norm; NaN where theirs is NaN. PURE.

    Args:
        most: the norm that they are clipped to.
        norm: theirs.
    """
    coefficient = most / (norm + 1e-6)
    return 1.0 if coefficient >= 1.0 else coefficient


class Gradients:
    """The gradients of one model.

    named: all parameters of the model by name; those that required no gradient then must stay so.
    square_norm: of the gradients of these parameters; None: of what lies in the buckets.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        buckets: Buckets,
        clip_norm: float | None,
        square_norm: Callable[[Sequence[int]], torch.Tensor] | None = None,
    ) -> None:
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self.named = trained
        self.names = list(trained)
        self.parameters = list(trained.values())
        self._buckets = buckets
        self._square_norm = square_norm or buckets.square_norm
        self._clip_norm = clip_norm
        self.unclipped: float | torch.Tensor | None = None
        """Norm that the newest step's sums had before they were clipped; None where nothing was to clip."""
        self._used: list[bool] = []
        self._any_empty = any(not parameter.numel() for parameter in self.parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._aside: dict[int, torch.Tensor] = {}
        self._shown: dict[int, tuple[torch.Tensor, int]] = {}
        self._factors: dict[int, float] = {}
        # What the library has left in .grad between two bodies, by parameter.
        self._given: list[torch.Tensor | None] = [None] * len(trained)
        self._empty: dict[int, torch.Tensor] = {}
        self._found: list[int] = []
        """Parameters that had a gradient when the body began."""
        self._begun: list[int] = []
        self._left_alone: dict[int, int] = {}
        """Stand-ins of the body for gradients that the script has not zeroed since they were used: their
        versions by parameter."""
        self._onto_left: list[int] = []
        """Parameters whose stand-in was still there when the running backward() began."""
        self._grown: set[int] = set()
        """Gradients that backward has added to one that was left, as `check_zeroed` tells."""
        self._used_versions = [-1] * len(trained)
        """Versions of the gradients that were placed, by parameter, when an optimizer had used them."""
        self._used_buckets: list[int] = []
        """Versions of the buckets, in place of those, where their views are the gradients of all parameters.
        """
        self._all_given = False
        self._in_backward = False
        self._first: dict[int, BeforeGradient] = {}
        """Hooks of parameters whose gradient came first in a backward()."""
        # Whether the buckets' views are the gradients of all parameters, as `check_ours` has seen.
        self._in_place = False
        self._forgotten: list[int] | None = None
        self._untouched: set[int] = set()
        """Forgotten gradients that the script has not zeroed."""
        # Parameters that do not lie in memory as the sums do (`channels_last`): see `lay_out`.
        self._strided = [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter.numel() and local_shard(parameter).stride() != buckets.views[index].stride()
        ]
        self._divided = any(map(is_dtensor, self.parameters))
        self._shown_of: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        """The buckets' views, and what stands for them as gradients of parameters."""
        self._laid_out: dict[int, torch.Tensor] = {}
        self._left_of: tuple[list[torch.Tensor], bool] | None = None
        self._left: list[torch.Tensor] = []

    @property
    def views(self) -> list[torch.Tensor]:
        """Return what stands for the sums as gradients, by parameter: views of the buckets, in parts where
        the parameters are.
        """
        views = self._buckets.views
        if not self._divided:
            return views
        if self._shown_of[0] is not views:
            parts = [as_dtensor(view, item) for view, item in zip(views, self.parameters, strict=True)]
            self._shown_of = views, parts
        return self._shown_of[1]

    @only_looks
    def begin(self) -> None:
        """A body begins, in which gradients that the last one has left stand for zeros: the script may take
        them away, and those that are left count (`check_ours`). After `check_gone`.
        """
        self._aside, self._shown, self._begun = {}, {}, []
        # A part of a step, or a step that is done again, begins with the stand-ins of the body before.
        before = self._left_alone
        self._left_alone, self._onto_left, self._grown, self._in_backward = {}, [], set(), False
        used, given = self._used_versions, self._given
        if self._found and self._used_buckets:
            used = [self._used_buckets[slot.bucket] for slot in self._buckets.layout.slots]
        for index in self._found:
            parameter = self.parameters[index]
            if parameter.numel():
                stands, left = self._nothing(index), parameter.grad
                if left is not None and stands is not None:
                    is_used = left is given[index] and used[index] == left._version
                    if is_used or (left is stands and before.get(index) == stands._version):
                        self._left_alone[index] = stands._version
                parameter.grad = stands
                self._begun.append(index)
            else:
                parameter.grad = None  # it stands for the rows of a table
        self._used_buckets = []
        if self._found:
            self._used_versions = [-1] * len(self.parameters)

    @only_looks
    def put_back(self) -> None:
        """Put back the stand-ins for zeros that were there when the body began; to be called after
        `Undo.put_back`.
        """
        for index in self._begun:
            self.parameters[index].grad = self._nothing(index)

    def _present(self) -> list[int]:
        """Return the numbers of the parameters that have a gradient."""
        gradients = list(map(_GRAD, self.parameters))
        if all(map(operator.is_, gradients, repeat(None))):
            return []
        return [index for index, gradient in enumerate(gradients) if gradient is not None]

    def _nothing(self, index: int) -> torch.Tensor | None:
        """Zeros that take no memory, and that backward adds to without writing into them; none for a
        parameter that is divided, which cannot have such.
        """
        if is_dtensor(self.parameters[index]):
            return None
        found = self._empty.get(index)
        if found is None:
            like = self.parameters[index]
            found = torch.zeros_like(like, layout=torch.sparse_coo, requires_grad=False)
            self._empty[index] = found
        return found

    @only_looks
    def check_gone(self) -> None:
        """Raise UsageError when the script holds gradients that would be lost; to be called when a body
        begins.
        """
        self._found = self._present()
        for index in self._found:
            gradient = self.parameters[index].grad
            if gradient is not self._given[index] and gradient is not self._empty.get(index):
                raise UsageError(
                    f"{self.names[index]} has a gradient from outside of the step, which would be lost: "
                    "call optimizer.zero_grad() before `with springtide.step():`"
                )

    def note_used(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """An optimizer has used the gradients of these parameters (None: all): from here on the script may
        zero them.
        """
        self._used_buckets = []
        if parameters is None:
            if self._all_given:
                self._used_buckets = self._buckets.versions()
                return
            given = self._given
            if all(map(operator.is_not, given, repeat(None))):
                self._used_versions = list(map(_VERSION, given))  # a tenth of what a loop takes
                return
            self._used_versions = [-1 if item is None else item._version for item in given]
            return
        for parameter in parameters:
            index = self._index.get(id(parameter))
            if index is not None and (one := self._given[index]) is not None:
                self._used_versions[index] = one._version

    def backward_reaches(self, index: int) -> None:
        """Backward has accumulated a gradient for the parameter, maybe the first of this backward().

        A gradient that the last step has used, and the script has not zeroed, would grow in plain PyTorch;
        here a stand-in for zeros is in its place. So a look is taken at who still has one when a backward()
        begins, and at who of them has none when it ends: the script does nothing meanwhile. The first
        parameter is too late for that, and has a hook from then on.
        """
        if self._in_backward or (self._first and not self._left_alone):
            return
        if index not in self._first:
            self._first[index] = BeforeGradient(self.parameters[index], partial(self._look, index))
        self._onto_left = [other for other in self._left_alone if self._is_left(other)]
        if not self._onto_left:
            self._left_alone = {}
            return
        self._in_backward = True
        _ENGINE.queue_callback(self._end_of_backward)

    def _look(self, index: int) -> None:
        if not self._in_backward and index in self._left_alone and self._is_left(index):
            self._grown.add(index)

    def _is_left(self, index: int) -> bool:
        """Whether the body's stand-in for a gradient is there, and was not zeroed."""
        stands = self.parameters[index].grad
        return (
            stands is not None
            and stands is self._empty.get(index)
            and stands._version == self._left_alone[index]
        )

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self._grown.update(index for index in self._onto_left if not self._is_left(index))

    def forget_zeroed(self) -> None:
        """Another backward begins in the body: see which gradients the script has zeroed meanwhile."""
        for index in list(self._grown):
            gradient = self.parameters[index].grad
            if gradient is None or not bool(gradient.any()):
                self._grown.discard(index)

    def check_zeroed(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise UsageError when one of these is about to use a gradient that was added to the last step's."""
        if not self._grown:
            return
        for parameter in (item for optimizer in optimizers for item in parameters_of(optimizer)):
            index = self._index.get(id(parameter))
            if index in self._grown and parameter.grad is not None:
                raise UsageError(
                    f"the gradient of {self.names[index]} was not zeroed since the last step, so that in "
                    "plain PyTorch this step's would be added to it; that sum belongs to no step that could "
                    "be done again. Call optimizer.zero_grad() in each body: before backward(), or after "
                    "optimizer.step()"
                )

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._first.values():
            handle.remove()
        self._first = {}

    def check_frozen(self) -> None:
        """Raise UsageError when a parameter is trained that nothing has been prepared for."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen when distribute() was called and requires a gradient now: "
                    "let everything that will ever be trained require gradients when calling distribute()"
                )

    @only_looks
    def check_ours(self, last_pass: int) -> list[int]:
        """Raise UsageError when the script replaced a gradient; to be called before the sums are waited for.

        Args:
            last_pass: number of the last micro-batch.

        Returns:
            The parameters that have zeros without any backward, as the script has zeroed an earlier body's
            gradient and not taken it away.
        """
        views = self.views
        self._in_place = self._buckets.has_all(last_pass) and all(
            map(operator.is_, map(_GRAD, self.parameters), views)
        )
        if self._in_place:
            return []
        zeros = []
        for index, parameter in enumerate(self.parameters):
            expected = self.views[index] if self._buckets.has(index, last_pass) else None
            if parameter.grad is expected:
                continue
            if expected is None and parameter.grad is self._empty.get(index):
                zeros.append(index)
                if index in self._left_alone and self._is_left(index):
                    self._grown.add(index)  # in plain PyTorch, an optimizer would use it again
            else:
                raise UsageError(
                    f"the gradient of {self.names[index]} was replaced between backward() and "
                    "optimizer.step(): call optimizer.zero_grad() after optimizer.step(), and give "
                    "distribute(..., clip_norm=) for clipping"
                )
        return zeros

    def present(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Numbers of those of the parameters that have a gradient."""
        found = (self._index.get(id(item)) for item in parameters if item.grad is not None)
        return [index for index in found if index is not None]

    def set_aside(self) -> Collection[int]:
        """Another backward begins in the same body: keep what the script has not zeroed, to be added to.

        Return which parameters' it is.
        """
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                ours = parameter.grad is self.views[index]
                self._aside[index] = parameter.grad.clone() if ours else parameter.grad
                parameter.grad = None
        return self._aside.keys()

    def place(self, used: list[bool], correction: float) -> None:
        """Make the sums, which are complete, the parameters' gradients.

        Args:
            used: by parameter, whether any member has a gradient for it; the others keep none.
            correction: that they are multiplied by.
        """
        if correction != 1.0:
            self._buckets.scale(correction)
        self._used = used
        self._shown = {}
        if self._in_place and not self._aside and not self._any_empty and False not in used:
            self._given[:], self._all_given = self.views, not self._divided
            return
        self._all_given = False
        for index, parameter in enumerate(self.parameters):
            view = self.views[index]
            if used[index] and not parameter.numel():
                # It stands for the rows of a table; of a version of its own, which tells when it is zeroed.
                view = view.data
                self._shown[index] = view, view._version
            parameter.grad = view if used[index] else None
            self._given[index] = view
        for index, earlier in self._aside.items():
            if index in self._shown:
                continue
            view = self.views[index]
            self.parameters[index].grad = view.add_(earlier) if used[index] else view.copy_(earlier)
        self._aside = {}

    def lay_out(self) -> None:
        """Give the optimizer gradients that lie in memory as their parameters do, until `lay_back`.

        A fused optimizer walks through raw memory: other strides would pair a gradient with another number's
        parameter. Only parameters that are not contiguous cost a copy.
        """
        for index in self._strided:
            parameter, view = self.parameters[index], self.views[index]
            if parameter.grad is view and local_shard(parameter).stride() != local_shard(view).stride():
                self._laid_out[index] = torch.empty_like(parameter, requires_grad=False).copy_(view)
                parameter.grad = self._laid_out[index]

    def lay_back(self) -> None:
        """Make the gradients that are still there the sums themselves again, after the optimizer's step."""
        for index, gradient in self._laid_out.items():
            if self.parameters[index].grad is gradient:
                self.parameters[index].grad = self.views[index]
        self._laid_out = {}

    def stands(self, index: int) -> bool:
        """Whether a gradient that is shown for a sum elsewhere is as it was placed."""
        shown, gradient = self._shown.get(index), self.parameters[index].grad
        return shown is not None and gradient is shown[0] and gradient._version == shown[1]

    def show_zeros(self, indices: Iterable[int]) -> None:
        """The sums are elsewhere: zeros without any backward are like all other gradients from here on."""
        for index in indices:
            self.parameters[index].grad = self.views[index]

    @only_looks
    def show(self, used: list[bool], copied: bool = False) -> None:
        """Let the script see what this worker has put into sums that are elsewhere, and take it away.

        Args:
            used: by parameter, whether any member has a gradient for it; the others keep none.
            copied: in memory of its own.
        """
        self._shown, self._factors = {}, {}
        for index, parameter in enumerate(self.parameters):
            # Of a version of its own: to zero it is no change of what is on its way.
            own = self.views[index].data if used[index] else None
            if own is not None and copied:
                own = own.clone()
            parameter.grad = own
            if own is not None:
                self._shown[index] = own, own._version

    @only_looks
    def hide(self, indices: Iterable[int]) -> set[int]:
        """Have an optimizer's step that is made elsewhere find no gradients here.

        Return the parameters that have none because the script has taken it away. Raise UsageError when it
        has changed one.
        """
        gone = set()
        for index in indices:
            shown, parameter = self._shown.get(index), self.parameters[index]
            if parameter.grad is None:
                gone.add(index)
            elif shown is None or parameter.grad is not shown[0] or shown[0]._version != shown[1]:
                raise UsageError(
                    f"the gradient of {self.names[index]} was changed between backward() and "
                    "optimizer.step(): the sum is on the parameter servers already. Give "
                    "distribute(..., clip_norm=) for clipping, and scale the loss instead of the gradients"
                )
            else:
                parameter.grad = None
        return gone

    @only_looks
    def show_again(self, indices: Iterable[int], factor: float) -> None:
        """Show the hidden gradients again after a step that was made elsewhere.

        Args:
            indices: of the parameters.
            factor: product of the factors by which that step and earlier ones have multiplied these
                gradients.
        """
        for index in indices:
            if (shown := self._shown.get(index)) is not None:
                self.parameters[index].grad = shown[0]
                self._factors[index] = factor

    def factor(self, index: int) -> float:
        """Return the factor by which this backward pass's steps have multiplied the parameter's gradient."""
        return self._factors.get(index, 1.0)

    @only_looks
    def left(self) -> dict[int, torch.Tensor]:
        """Another backward begins in the same body: what the script has not taken away, by parameter.

        Raise UsageError for what is not of `show`.
        """
        kept = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            if (shown := self._shown.get(index)) is None or parameter.grad is not shown[0]:
                raise UsageError(
                    f"the gradient of {self.names[index]} was replaced between two backward() of the body: "
                    "call optimizer.zero_grad() instead"
                )
            if parameter.numel() or parameter.grad._version == shown[1]:
                kept[index] = parameter.grad * self.factor(index)
            # Otherwise it stands for the rows of a table, and was zeroed.
            parameter.grad = None
        return kept

    @only_looks
    def forget(self) -> None:
        """Take all gradients away, so that nothing is left for an optimizer of this process."""
        self._forgotten = [
            index for index, parameter in enumerate(self.parameters) if parameter.grad is not None
        ]
        self._untouched = set(filter(self.stands, self._forgotten))
        for index in self._forgotten:
            self.parameters[index].grad = None

    @only_looks
    def leave(self, used: list[bool], needed: bool) -> None:
        """Show gradients again that were forgotten for the one step of a body.

        The script may then zero them or take them away, as in one process.

        Args:
            used: as for `place`.
            needed: this worker's gradients may still have to leave, so zeros are shown that take no memory;
                otherwise the script sees the gradients that this worker has put in.
        """
        if self._forgotten is None:
            return
        self._forgotten, self._all_given = None, False
        views = self.views
        if self._left_of is None or self._left_of[0] is not views or self._left_of[1] != needed:
            left = [view.new_zeros(()).expand(view.shape) if needed else view.data for view in views]
            self._left_of, self._left = (views, needed), left
        for index, parameter in enumerate(self.parameters):
            if used[index] and parameter.numel():
                parameter.grad = self._given[index] = self._left[index]

    @only_looks
    def leave_zeros(self) -> None:
        """Show zeros for the gradients that were forgotten and that the script has not taken away.

        It is for the end of a body that may have had several steps.
        """
        for index in self._forgotten or ():
            if self.parameters[index].numel():
                self.parameters[index].grad = stands = self._nothing(index)
                self._left_alone.pop(index, None)
                if stands is not None and index in self._untouched:
                    self._left_alone[index] = stands._version
        self._forgotten = None

    def norm(self) -> float:
        """Return the 2-norm of all placed gradients together."""
        indices = [index for index, is_used in enumerate(self._used) if is_used]
        return math.sqrt(float(self._square_norm(indices)))

    def clip_here(self, optimizers_own: Iterable[torch.Tensor] | None, scale: float) -> None:
        """Clip the gradients where none are elsewhere, by `clip`; on a device nothing is waited for.

        Args:
            optimizers_own: parameters of one optimizer, whose gradients are clipped by themselves; None: all.
            scale: that a GradScaler has multiplied them by.
        """
        if self._clip_norm is None:
            return
        indices = self._to_clip(optimizers_own)
        if not indices:
            return
        square = self._square_norm(indices)
        if square.device.type == "cpu":
            self.clip(optimizers_own, scale)
            return
        self.unclipped = square.sqrt() / scale
        coefficient = (self._clip_norm / (self.unclipped + 1e-6)).clamp(max=1.0)
        self._multiply(optimizers_own is None, indices, coefficient)

    def clip(
        self, optimizers_own: Iterable[torch.Tensor] | None, scale: float = 1.0, elsewhere: float = 0.0
    ) -> float:
        """Clip the placed gradients to the global norm that was asked for, if any.

        Args:
            optimizers_own: the parameters whose gradients are meant; None: all.
            scale: the gradients are still multiplied by it.
            elsewhere: norm of gradients that belong to them and are not here.

        Returns:
            The factor that all of them are multiplied by.
        """
        if self._clip_norm is None:
            return 1.0
        indices = self._to_clip(optimizers_own)
        norm = math.hypot(math.sqrt(float(self._square_norm(indices))), elsewhere) / scale
        self.unclipped = norm
        return self._clip_by(clip_coefficient(self._clip_norm, norm), optimizers_own is None, indices)

    def clip_to(self, norm: float) -> None:
        """Clip all placed gradients to the norm that was asked for, if any, where theirs is known.

        Args:
            norm: theirs.
        """
        if self._clip_norm is not None:
            self.unclipped = norm
            self._clip_by(clip_coefficient(self._clip_norm, norm), True, self._to_clip(None))

    def _clip_by(self, coefficient: float, all_of_them: bool, indices: list[int]) -> float:
        if coefficient != 1.0:
            self._multiply(all_of_them, indices, coefficient)
        return coefficient

    def _to_clip(self, optimizers_own: Iterable[torch.Tensor] | None) -> list[int]:
        if optimizers_own is None:
            return [index for index, is_used in enumerate(self._used) if is_used]
        own = (self._index.get(id(item)) for item in optimizers_own)
        return [i for i in own if i is not None and self.parameters[i].grad is self.views[i]]

    def _multiply(self, all_of_them: bool, indices: list[int], coefficient: float | torch.Tensor) -> None:
        if all_of_them:
            self._buckets.scale(coefficient)
        elif indices:
            torch._foreach_mul_([self.views[index] for index in indices], coefficient)
