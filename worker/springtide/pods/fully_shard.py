"""`fully_shard` averages gradients over the processes of a pod; here it weighs each by its samples first.

Parts of a global batch differ by a sample where it does not divide evenly, and one may be empty. torch lets a
script put its own reduce-scatter in (`set_custom_reduce_scatter`), which has the flat gradients in its hands
before they are summed: multiplied there by this process's weight, the sum is that of the samples. Nothing is
raised in a hook of backward for the sake of other pods, since what `fully_shard` has gathered and begun would
stay half done; see `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from springtide.errors import UsageError


def weigh_gradients(models: Sequence[torch.nn.Module], weight: Callable[[], float]) -> None:
    """Have `fully_shard` multiply the gradients of this process before it averages them.

    Args:
        models: of the script; modules in them that `fully_shard` has not been called on are left alone.
        weight: returns the factor, each time that gradients are about to be summed.

    Raises:
        UsageError: this torch is too old, or a module cannot be told; torch's reason is given.
    """
    from torch.distributed.fsdp import FSDPModule  # imported already, where there are any

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UsageError(
            f"distribute(): fully_shard of torch {torch.__version__} has no set_custom_reduce_scatter(), by "
            "which gradients are weighed by samples: use a newer torch, or a mesh of tp alone"
        )
    comm = _weighed(weight)
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                try:
                    module.set_custom_reduce_scatter(comm)
                except ValueError as error:
                    raise UsageError(
                        f"distribute(): the gradients of {name or 'the model'} cannot be weighed by samples: "
                        f"{error}; call fully_shard() with one mesh for all parameters of a module"
                    ) from None


def reshard(models: Sequence[torch.nn.Module]) -> None:
    """Free whole parameters that a forward pass without a backward pass has left; the parts are kept.

    They would go into the next forward pass as they are, although the parts may be others by then.

    Args:
        models: of the script.
    """
    from torch.distributed.fsdp import FSDPModule

    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _weighed(weight: Callable[[], float]) -> Any:
    """Return the reduce-scatter, of a class of torch's: it is imported only where it is needed."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    # The old name is deprecated where there is the new one.
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    class WeighedReduceScatter(ReduceScatter):
        """Multiply by the process's weight, then reduce and scatter as torch does."""

        def allocate(
            self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
                raise UsageError(
                    "set_gradient_divide_factor() cannot be together with springtide, which divides by the "
                    "samples of the global batch: leave it out"
                )
            factor = weight()
            if factor == 0.0:
                input_tensor.zero_()  # 0 x NaN is NaN
            elif factor != 1.0:
                input_tensor.mul_(factor)
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    return WeighedReduceScatter()
