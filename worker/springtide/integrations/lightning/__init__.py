"""Train with Lightning, elastically: `Trainer(strategy=SpringtideStrategy())`.

Nothing of lightning is imported before `SpringtideStrategy` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.integrations.lightning.strategy import SpringtideStrategy

__all__ = ["SpringtideStrategy"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what needs lightning when it is first used, and say what is missing."""
        if name != "SpringtideStrategy":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from springtide.integrations.lightning.strategy import SpringtideStrategy
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in ("lightning", "torchmetrics"):
                raise
            raise ImportError(
                f"springtide.integrations.lightning needs {missing}, which is not installed: "
                "pip install 'springtide[worker,lightning]'"
            ) from error
        globals()[name] = SpringtideStrategy
        return SpringtideStrategy
