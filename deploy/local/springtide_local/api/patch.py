"""Patches: JSON merge patch (RFC 7386), JSON patch (RFC 6902), strategic merge by the merge keys of the
schema.
"""

from __future__ import annotations

from typing import Any

import jsonpatch
import jsonpointer

from springtide_local.api import errors
from springtide_local.api.objects import clone, clone_value
from springtide_local.api.schema import Node
from springtide_local.ports import ApiError, Object


def merge_patch(target: Any, patch: Any) -> Any:
    """Return a value patched by RFC 7386: objects merge, null removes, everything else replaces.

    Args:
        target: decoded JSON; it stays as it is.
        patch: decoded JSON.

    Returns:
        A new value; parts of `target` that stay are shared.
    """
    if not isinstance(patch, dict):
        return clone_value(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def json_patch(target: Object, operations: Any) -> Object:
    """Return an object patched by RFC 6902.

    Args:
        target: decoded JSON; it stays as it is.
        operations: decoded JSON.

    Raises:
        ApiError: 400: they are malformed; 422: they do not apply.
    """
    if not isinstance(operations, list):
        raise errors.bad_request(
            "error decoding patch: json: cannot unmarshal object into Go value of type []patch"
        )
    try:
        result = jsonpatch.JsonPatch(operations).apply(clone(target))
    except jsonpatch.JsonPatchTestFailed as problem:
        raise _not_applied(f"testing value failed: {problem}") from None
    except (jsonpatch.JsonPatchConflict, jsonpointer.JsonPointerException) as problem:
        raise _not_applied(str(problem)) from None
    except (jsonpatch.InvalidJsonPatch, TypeError, KeyError) as problem:
        raise errors.bad_request(f"error decoding patch: {problem}") from None
    if not isinstance(result, dict):
        raise errors.bad_request("the patch leaves something that is no object")
    return result


def _not_applied(why: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")


def strategic_merge(target: Any, patch: Any, node: Node | None) -> Any:
    """Return a value merged by the schema: lists with a merge key merge item by item, sets unite.

    Knows the directives `$patch: replace|delete|merge`, `$retainKeys`, `$deleteFromPrimitiveList/NAME` and
    `$setElementOrder/NAME`. Source: "Strategic Merge Patch" of the Kubernetes API conventions.

    Args:
        target: decoded JSON; it stays as it is.
        patch: decoded JSON.
        node: schema of both; None: none is known.

    Returns:
        A new value; parts of `target` that stay are shared.
    """
    if not isinstance(patch, dict):
        return clone_value(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return clone({name: value for name, value in patch.items() if name != "$patch"})
    if directive == "delete":
        return {}
    result = dict(target) if isinstance(target, dict) else {}
    retained = patch.get("$retainKeys")
    if isinstance(retained, list):
        result = {name: value for name, value in result.items() if name in retained}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            result[field] = [item for item in result.get(field) or [] if item not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = _merged_field(result.get(name), value, _child(node, name))
    for name, value in patch.items():
        if name.startswith("$setElementOrder/"):
            field = name.partition("/")[2]
            if isinstance(result.get(field), list):
                result[field] = _ordered(result[field], value, _child(node, field))
    return result


def _child(node: Node | None, name: str) -> Node | None:
    return node.properties.get(name, node.additional) if node is not None else None


def _merged_field(target: Any, value: Any, node: Node | None) -> Any:
    if isinstance(value, dict):
        return strategic_merge(target, value, node)
    if not isinstance(value, list):
        return value
    if node is None or "merge" not in node.patch_strategy:
        return [_without_directives(item) for item in value if not _is_directive(item)]
    current = list(target) if isinstance(target, list) else []
    if not node.merge_key:
        return current + [item for item in value if item not in current]
    return _merged_list(current, value, node.merge_key, node.items)


def _is_directive(item: Any) -> bool:
    return isinstance(item, dict) and "$patch" in item and len(item) == 1


def _without_directives(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _without_directives(value) for name, value in item.items() if not name.startswith("$")}
    return clone_value(item)


def _merged_list(current: list[Any], patch: list[Any], key: str, node: Node | None) -> list[Any]:
    if any(_is_directive(item) and item["$patch"] == "replace" for item in patch):
        return [_without_directives(item) for item in patch if not _is_directive(item)]
    result = list(current)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise errors.bad_request(f"map: {errors.shown(item)} does not contain declared merge key: {key}")
        place = next((i for i, old in enumerate(result) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            result = [old for old in result if old.get(key) != item[key]]
        elif place is None:
            result.append(_without_directives(item))
        else:
            result[place] = strategic_merge(result[place], item, node)
    return result


def _ordered(items: list[Any], order: list[Any], node: Node | None) -> list[Any]:
    """Items named in `order` in that order, at the places where they stand; the others stay where they
    are.
    """
    key = node.merge_key if node is not None else ""

    def name(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    ranks = {_hashable(name(item)): rank for rank, item in enumerate(order)}
    known = sorted(
        (item for item in items if _hashable(name(item)) in ranks),
        key=lambda item: ranks[_hashable(name(item))],
    )
    queue = iter(known)
    return [next(queue) if _hashable(name(item)) in ranks else item for item in items]


def _hashable(value: Any) -> Any:
    return errors.shown(value) if isinstance(value, dict | list) else value
