"""Which of the shapes that a client accepts it gets: plain JSON, a Table, bare metadata, aggregated
discovery.
"""

from __future__ import annotations

from typing import NamedTuple

from springtide_local.api import errors

AGGREGATED = ("APIGroupDiscoveryList", "apidiscovery.k8s.io")


class Shape(NamedTuple):
    """`kind` is empty for the plain object, else what `as=` names; `version` is that of the shape."""

    kind: str = ""
    group: str = ""
    version: str = ""


def negotiate(accept: str, offered: tuple[str, ...]) -> Shape:
    """Return the first entry of an Accept header that can be served.

    Args:
        accept: the header's value; "" for none.
        offered: the kinds that are known besides plain JSON.

    Raises:
        ApiError: 406: JSON in no known shape is accepted.
    """
    if not accept:
        return Shape()
    for entry in accept.split(","):
        media, *parameters = [part.strip() for part in entry.split(";")]
        if media not in ("application/json", "application/*", "*/*", "application/yaml"):
            continue
        given = dict(part.split("=", 1) for part in parameters if "=" in part)
        if "as" not in given:
            return Shape()
        if given["as"] in offered and given.get("v") in ("v1", "v2", "v2beta1"):
            return Shape(given["as"], given.get("g", ""), given["v"])
    raise errors.not_acceptable("only the following media types are accepted: application/json")
