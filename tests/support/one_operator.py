"""Have torch make each operator's Python object once, whatever threads ask for it first.

`torch.ops.aten.add` and its overloads are made at their first use: by a thread that computes below a
TorchDispatchMode or with a subclass of tensors, too. Two threads that do so at once make one each, of which
`torch.ops` keeps the later; the dispatcher in C++ has noted the address of the earlier, which is freed, and
the next use of the operator ends the process by SIGSEGV (in `find_torch_dispatch_rule`, seen with torch
2.13). Scripts have one such thread, tests run ranks as threads. To import this module is enough.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_making = threading.RLock()


def _make_once(kind: Any) -> None:
    """Let `kind`, which makes its attributes in `__getattr__`, return one that another thread has made."""
    make = kind.__getattr__

    def get(self: Any, name: str) -> Any:
        with _making:
            made = vars(self)
            return made[name] if name in made else make(self, name)

    kind.__getattr__ = get


for _kind in (type(torch.ops.aten), type(torch.ops.aten.add)):
    _make_once(_kind)
