"""Ages as kubectl prints them."""

from __future__ import annotations

from springtide_local.api.objects import parse_timestamp

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def human_duration(seconds: float) -> str:
    """`45s`, `3m20s`, `5h`, `2d3h`: the two largest units while they matter (apimachinery's
    HumanDuration).
    """
    total = int(seconds)
    if seconds < -2:
        return "<invalid>"
    if total <= 0:
        return "0s"
    if total < 2 * _MINUTE:
        return f"{total}s"
    minutes = total // _MINUTE
    if minutes < 10:
        return f"{minutes}m" + (f"{total % _MINUTE}s" if total % _MINUTE else "")
    if minutes < 180:
        return f"{minutes}m"
    hours = total // _HOUR
    if hours < 8:
        return f"{hours}h" + (f"{minutes % 60}m" if minutes % 60 else "")
    if hours < 48:
        return f"{hours}h"
    days = total // _DAY
    if days < 8:
        return f"{days}d" + (f"{hours % 24}h" if hours % 24 else "")
    if days < 730:
        return f"{days}d"
    years = days // 365
    if years < 8:
        return f"{years}y" + (f"{days % 365}d" if days % 365 else "")
    return f"{years}y"


def age(text: str | None, now: float) -> str:
    """Return the time since an RFC 3339 time, as kubectl shows it; `<unknown>` without one.

    Args:
        text: the earlier time.
        now: unix seconds.
    """
    if not text:
        return "<unknown>"
    try:
        return human_duration(now - parse_timestamp(text))
    except ValueError:
        return "<invalid>"
