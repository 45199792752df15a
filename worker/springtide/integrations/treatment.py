"""Say what becomes of an argument of another library's trainer in an elastic job. PURE.

An argument is supported, without meaning there, or refused unless it has one of a few values, so that none is
ignored without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Treatment(StrEnum):
    """Say what becomes of a field."""

    SUPPORTED = "supported"
    IRRELEVANT = "without meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """Describe one field.

    Attributes:
        treatment: of the field.
        note: what it means here, or why it cannot be and what to do instead.
        is_allowed: of a refused one, which values do no harm.
        allowed: the same in words, for the table.
    """

    treatment: Treatment
    note: str = ""
    is_allowed: Callable[[Any], bool] = bool
    allowed: str = ""


def supported(note: str = "") -> Field:
    """Return a field that counts."""
    return Field(Treatment.SUPPORTED, note)


def irrelevant(note: str) -> Field:
    """Return a field that means nothing in a job."""
    return Field(Treatment.IRRELEVANT, note)


def refused(note: str, *allowed: Any) -> Field:
    """Return a field that may have some values only.

    Args:
        note: why, and what to do instead.
        allowed: the values; without any, it has to be empty or False.
    """
    if not allowed:
        return Field(Treatment.REFUSED, note, lambda value: not value, "left out")
    return Field(
        Treatment.REFUSED,
        note,
        lambda value: getattr(value, "value", value) in allowed,
        " or ".join(f"`{value}`" for value in allowed),
    )
