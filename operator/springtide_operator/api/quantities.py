"""Quantities of resources, as Kubernetes writes them."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from springtide_operator.api import limits

_QUANTITY = re.compile(r"^([+-]?[0-9.]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$")
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def quantity(text: object) -> Decimal:
    """A resource quantity in its base unit. Raises ValueError for what is none, and for what no machine has:
    `1e999999` would be a number of a million digits.
    """
    written_as = str(text).strip() if isinstance(text, str | int | float) else ""
    found = _QUANTITY.match(written_as) if len(written_as) <= limits.MAX_QUANTITY_LENGTH else None
    if found is None:
        raise ValueError(f"{str(text)[:80]!r} is no quantity")
    suffix = found[2] or ""
    scientific = suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix not in _BINARY
    if scientific and abs(int(suffix[1:])) > limits.MAX_QUANTITY_EXPONENT:
        raise ValueError(
            f"{text!r} is no quantity that any machine has: exponents go from"
            f" -{limits.MAX_QUANTITY_EXPONENT} to {limits.MAX_QUANTITY_EXPONENT}"
        )
    try:
        number = Decimal(found[1])
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no quantity") from error
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if scientific:
        return number * Decimal(10) ** int(suffix[1:])
    return number * Decimal(10) ** _POWERS.get(suffix, 0)
