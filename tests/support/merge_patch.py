"""Merge patches, as the API server applies them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def merged(target: Object, patch: Object) -> Object:
    """RFC 7386."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = merged(before if isinstance(before, dict) else {}, value)
        else:
            result[key] = value
    return result
