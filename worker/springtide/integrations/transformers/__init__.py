"""Train with Hugging Face's Trainer, elastically: `ElasticTrainer` in the place of `transformers.Trainer`.

Nothing of transformers is imported before `ElasticTrainer` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide.integrations.transformers.trainer import ElasticTrainer

__all__ = ["ElasticTrainer"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what needs transformers when it is first used, and say what is missing."""
        if name != "ElasticTrainer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from springtide.integrations.transformers.trainer import ElasticTrainer
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("transformers", "accelerate"):
                raise
            raise ImportError(
                f"springtide.integrations.transformers needs {error.name}, which is not installed: "
                "pip install 'springtide[worker,transformers]'"
            ) from error
        globals()[name] = ElasticTrainer
        return ElasticTrainer
