from __future__ import annotations
from typing import Any
def track(old: Any, obj: Any, resource: Any, manager: str, subresource: str | None, now: float) -> None:
    return None
