"""Scripts of pods that begin in half of the processor time, since they do without torch's compiler.

torch's first optimizer imports the compiler whether or not it is used, and Python looks for garbage among all
that is imported. A pod's process is a fresh one, so that each of some hundred workers would pay for it.
"""

from __future__ import annotations

PRELUDE = """
import gc, sys, types

gc.disable()
compiler = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
import torch, springtide.api
gc.enable()
"""


def uncompiled(script: str) -> str:
    """Return the script without torch's compiler. It may compile nothing and end no process group of its own.

    Args:
        script: a program's text, without `from __future__ import`.
    """
    return PRELUDE + script
