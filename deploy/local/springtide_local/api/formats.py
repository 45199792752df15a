"""The string formats that a CRD's schema may name and the API server checks."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable
from datetime import date

from springtide_local.api.objects import parse_timestamp

_DURATION = re.compile(r"[-+]?(0|(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+\Z")
_UUID = re.compile(r"(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\Z")
_HOSTNAME = re.compile(
    r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?)*\Z"
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\Z")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:\S+|/\S*)\Z")


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda value: pattern.match(value) is not None


def _parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            parse(value)
        except (ValueError, binascii.Error):
            return False
        return True

    return check


_CHECKS: dict[str, Callable[[str], bool]] = {
    "date-time": _parses(parse_timestamp),
    "datetime": _parses(parse_timestamp),
    "date": _parses(date.fromisoformat),
    "duration": _matches(_DURATION),
    "uuid": _matches(_UUID),
    "hostname": _matches(_HOSTNAME),
    "email": _matches(_EMAIL),
    "uri": _matches(_URI),
    "ipv4": _parses(ipaddress.IPv4Address),
    "ipv6": _parses(ipaddress.IPv6Address),
    "cidr": _parses(ipaddress.ip_network),
    "byte": _parses(lambda value: base64.b64decode(value, validate=True)),
}


def format_problem(name: str, value: str) -> bool:
    """Return whether a value is not of a format.

    Args:
        name: of the format; those that are not known are not checked.
        value: a string.
    """
    check = _CHECKS.get(name)
    return check is not None and not check(value)
