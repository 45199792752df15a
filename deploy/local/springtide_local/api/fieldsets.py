"""Sets of field paths as tries, in the form of `metadata.managedFields[].fieldsV1`.

A key is `f:NAME` (a field), `k:{JSON}` (an item of a map list by its keys) or `v:JSON` (an item of a set);
the key `.` marks that the path that ends here belongs to the set. On the wire a node with nothing but `.` is
written `{}`; here, it never is. Source of the semantics: structured-merge-diff, the library behind
server-side apply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from springtide_local.api.schema import MISSING, Node

Trie = dict[str, Any]
_MEMBER: Trie = {}


def leaf() -> Trie:
    return {".": _MEMBER}


def load(wire: Any) -> Trie:
    """A set from its wire form."""
    made: Trie = {}
    for key, below in (wire or {}).items():
        if key == ".":
            made["."] = _MEMBER
        else:
            made[key] = load(below) if below else leaf()
    return made


def dump(trie: Trie) -> Trie:
    """The wire form."""
    return {
        key: {} if key == "." or (len(below) == 1 and "." in below) else dump(below)
        for key, below in sorted(trie.items())
    }


def union(left: Trie, right: Trie) -> Trie:
    """Return the fields that are in either set; parts are shared.

    Args:
        left: a set of fields.
        right: another one.
    """
    made = dict(left)
    for key, below in right.items():
        made[key] = union(made[key], below) if key in made else below
    return made


def difference(left: Trie, right: Trie) -> Trie:
    """Return the fields of `left` that are not in `right`; parts are shared.

    Args:
        left: a set of fields.
        right: another one.
    """
    made: Trie = {}
    for key, below in left.items():
        if key not in right:
            made[key] = below
        elif key != ".":
            rest = difference(below, right[key])
            if rest:
                made[key] = rest
    return made


def intersection(left: Trie, right: Trie) -> Trie:
    """Return the fields that are in both sets.

    Args:
        left: a set of fields.
        right: another one.
    """
    made: Trie = {}
    for key, below in left.items():
        if key == "." and key in right:
            made["."] = _MEMBER
        elif key in right:
            common = intersection(below, right[key])
            if common:
                made[key] = common
    return made


def without_below(left: Trie, right: Trie) -> Trie:
    """Return `left` without the fields of `right` and everything below them (a field that is removed takes
    its own with it).

    Args:
        left: a set of fields.
        right: another one.
    """
    made: Trie = {}
    for key, below in left.items():
        other = right.get(key)
        if other is None:
            made[key] = below
        elif key != "." and "." not in other:
            rest = without_below(below, other)
            if rest:
                made[key] = rest
    return made


def paths(trie: Trie, path: str = "") -> Iterator[str]:
    """Yield the members in the form `.spec.containers[name="a"].image`, sorted.

    Args:
        trie: a set of fields.
        path: of the set itself.
    """
    if "." in trie:
        yield path
    for key, below in sorted(trie.items()):
        if key != ".":
            yield from paths(below, path + shown(key))


def shown(key: str) -> str:
    kind, _, text = key.partition(":")
    if kind == "f":
        return f".{text}"
    if kind == "k":
        inside = ",".join(f"{name}={json.dumps(value)}" for name, value in json.loads(text).items())
        return f"[{inside}]"
    return f"[={text}]"


def child(node: Node | None, name: str) -> Node | None:
    """Return the schema of a field; None where there is none.

    Args:
        node: schema of the object.
        name: of the field.
    """
    if node is None:
        return None
    return node.properties.get(name, node.additional)


def item_key(node: Node, item: Any) -> str:
    """Return the key of an item of a map list or a set.

    Args:
        node: schema of the list.
        item: of the list.
    """
    if node.list_type == "set":
        return "v:" + json.dumps(item, separators=(",", ":"), sort_keys=True)
    keys = {}
    for name in node.list_keys:
        default = None
        below = child(node.items, name)
        if below is not None and below.default is not MISSING:
            default = below.default
        value = item.get(name, default) if isinstance(item, dict) else default
        if value is None and name == "protocol":
            value = "TCP"
        if value is not None:
            keys[name] = value
    return "k:" + json.dumps(keys, separators=(",", ":"), sort_keys=True)


def is_granular_map(node: Node | None, value: Any) -> bool:
    """Return whether the fields of a value are owned one by one.

    Args:
        node: schema of the value; None: none is known.
        value: decoded JSON.
    """
    return isinstance(value, dict) and (node is None or node.map_type != "atomic")


def is_granular_list(node: Node | None, value: Any) -> bool:
    """Return whether the items of a value are owned one by one.

    Args:
        node: schema of the value; None: none is known.
        value: decoded JSON.
    """
    return isinstance(value, list) and node is not None and node.list_type in ("map", "set")


def fields_of(value: Any, node: Node | None) -> Trie:
    """Return the set of all fields of a value.

    Lists that no schema describes are one field, as are empty objects.

    Args:
        value: decoded JSON.
        node: schema of the value; None: none is known.
    """
    if is_granular_map(node, value) and value:
        return {f"f:{name}": fields_of(item, child(node, name)) for name, item in value.items()}
    if node is not None and is_granular_list(node, value) and value:
        made: Trie = {}
        for item in value:
            below = leaf() if node.list_type == "set" else {**leaf(), **fields_of(item, node.items)}
            made[item_key(node, item)] = below
        return made
    return leaf()


def compare(old: Any, new: Any, node: Node | None) -> tuple[Trie, Trie]:
    """Return the fields in which two values differ.

    Args:
        old: decoded JSON.
        new: decoded JSON.
        node: schema of both; None: none is known.

    Returns:
        The fields that are new or changed, and those that are gone.
    """
    if old == new:
        return {}, {}
    changed: Trie = {}
    removed: Trie = {}
    if is_granular_map(node, old) and is_granular_map(node, new):
        before = {f"f:{name}": (item, child(node, name)) for name, item in old.items()}
        after = {f"f:{name}": (item, child(node, name)) for name, item in new.items()}
    elif node is not None and is_granular_list(node, old) and is_granular_list(node, new):
        below = None if node.list_type == "set" else node.items
        before = {item_key(node, item): (item, below) for item in old}
        after = {item_key(node, item): (item, below) for item in new}
    else:
        return leaf(), {}
    for key, (item, below) in after.items():
        if key not in before:
            added = fields_of(item, below)
            changed[key] = {**leaf(), **added} if key[0] in "kv" else added
        else:
            part, gone = compare(before[key][0], item, below)
            if part:
                changed[key] = part
            if gone:
                removed[key] = gone
    for key, (item, below) in before.items():
        if key not in after:
            removed[key] = {**leaf(), **fields_of(item, below)}
    return changed, removed


def merge(live: Any, config: Any, node: Node | None) -> Any:
    """Lay a configuration over a value: maps and keyed lists merge, the rest is replaced.

    Args:
        live: the value; it stays as it is.
        config: laid over it.
        node: schema of both; None: none is known.

    Returns:
        A new value that shares parts with both.
    """
    if is_granular_map(node, config) and isinstance(live, dict):
        made = dict(live)
        for name, item in config.items():
            made[name] = merge(live[name], item, child(node, name)) if name in live else item
        return made
    if node is not None and is_granular_list(node, config) and isinstance(live, list):
        wanted = {item_key(node, item): item for item in config}
        result = [
            merge(item, wanted.pop(key), node.items) if (key := item_key(node, item)) in wanted else item
            for item in live
        ]
        return result + list(wanted.values())
    return config


def remove(value: Any, trie: Trie, node: Node | None) -> Any:
    """Take fields out of a value; containers that become empty by it go too.

    Args:
        value: it stays as it is.
        trie: the fields to take out.
        node: schema of the value; None: none is known.

    Returns:
        A new value that shares parts with the old one.
    """
    if isinstance(value, dict):
        made = {}
        for name, item in value.items():
            below = trie.get(f"f:{name}")
            if below is None:
                made[name] = item
                continue
            rest = _rest(item, below, child(node, name))
            if rest is not MISSING:
                made[name] = rest
        return made
    if node is not None and is_granular_list(node, value):
        kept = []
        for item in value:
            below = trie.get(item_key(node, item))
            rest = item if below is None else _rest(item, below, node.items)
            if rest is not MISSING:
                kept.append(rest)
        return kept
    return value


def _rest(item: Any, trie: Trie, node: Node | None) -> Any:
    if "." in trie:
        return MISSING
    rest = remove(item, trie, node)
    return MISSING if rest in ({}, []) and item not in ({}, []) else rest


def value_at(value: Any, key: str, node: Node | None) -> tuple[Any, Node | None]:
    """Return value and schema one step down.

    Args:
        value: decoded JSON.
        key: of a trie: a field or an item.
        node: schema of the value; None: none is known.

    Returns:
        `MISSING` in place of a value that is not there; None for a schema that is not known.
    """
    kind, _, text = key.partition(":")
    if kind == "f":
        found = value.get(text, MISSING) if isinstance(value, dict) else MISSING
        return found, child(node, text)
    if node is None or not isinstance(value, list):
        return MISSING, None
    found = next((item for item in value if item_key(node, item) == key), MISSING)
    return found, node.items


def differing(trie: Trie, left: Any, right: Any, node: Node | None) -> Trie:
    """Return the members of a set at which two values differ.

    Args:
        trie: a set of fields.
        left: a value.
        right: another one.
        node: schema of both; None: none is known.
    """
    made: Trie = {}
    inner = [key for key in trie if key != "."]
    if "." in trie and not inner and left != right:
        made["."] = _MEMBER
    for key in inner:
        first, below = value_at(left, key, node)
        second, _ = value_at(right, key, node)
        part = differing(cast(Trie, trie[key]), first, second, below)
        if part:
            made[key] = part
    return made
