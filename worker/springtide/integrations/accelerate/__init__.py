"""Train with Hugging Face's Accelerate, elastically: `ElasticAccelerator` in the place of `Accelerator`.

Nothing of accelerate is imported before `ElasticAccelerator` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.integrations.accelerate.accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what needs accelerate when it is first used, and say what is missing."""
        if name != "ElasticAccelerator":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from springtide.integrations.accelerate.accelerator import ElasticAccelerator
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing != "accelerate":
                raise
            raise ImportError(
                f"springtide.integrations.accelerate needs {missing}, which is not installed: "
                "pip install 'springtide[worker,accelerate]'"
            ) from error
        globals()[name] = ElasticAccelerator
        return ElasticAccelerator
