"""Read and check a manifest before anything is sent. Pure, but for `read`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from springtide_cli.errors import Refused

Object = dict[str, Any]

GROUP = "springtide.dev"
KIND = "TrainingJob"


@dataclass(frozen=True, slots=True)
class Manifest:
    """objects: all documents in order. job: the one TrainingJob among them."""

    objects: tuple[Object, ...]
    job: Object


@dataclass(frozen=True, slots=True)
class Changes:
    """Fields of the job that the command line gives in place of the manifest's.

    Attributes:
        template: NAME of a ClusterTrainingTemplate, or KIND/NAME; "" leaves the manifest as it is.
        standby: pods that stand by; None leaves the manifest as it is.
    """

    template: str = ""
    standby: int | None = None


def with_changes(manifest: Manifest, changes: Changes) -> Manifest:
    """Return the manifest with what the command line says.

    Args:
        manifest: the checked manifest.
        changes: to its job.

    Raises:
        Refused: the template's name is none, or the job's spec cannot take it.
    """
    spec: Object = {}
    if changes.template:
        from springtide_operator.api.effective_spec import parse_reference  # it takes a quarter of a second

        try:
            named = parse_reference(changes.template)
        except ValueError as error:
            raise Refused(f"--template: {error}") from None
        spec["templateRef"] = {"kind": named.kind, "name": named.name}
    if changes.standby is not None:
        spec["workers"] = {"standby": changes.standby}
    if not spec:
        return manifest
    job = _over(manifest.job, {"spec": spec}, KIND)
    objects = tuple(job if obj is manifest.job else obj for obj in manifest.objects)
    return Manifest(objects, job)


def _over(value: object, fields: Object, path: str) -> Object:
    """Return an object with fields over its own; raise Refused where there is something else."""
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise Refused(f"{path} is {_describe(value)}, and has to be an object")
    result = dict(value)
    for key, field in fields.items():
        whole = not isinstance(field, dict) or key == "templateRef"
        result[key] = field if whole else _over(value.get(key), field, f"{path}.{key}")
    return result


def read(path: str) -> str:
    """The text of a file, or of standard input for `-`. Raise Refused."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refused(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: not a text file ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def parse(text: str, name: str) -> Manifest:
    """Check the documents of a manifest.

    Args:
        text: YAML, of one or several documents.
        name: begins the messages.

    Returns:
        Its objects, and the one job among them.

    Raises:
        Refused: it is malformed, or has no job or several.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise Refused(f"{name}: malformed YAML{_place(error)}") from error
    objects: list[Object] = []
    for number, document in enumerate(documents, 1):
        where = name if len(documents) == 1 else f"{name}, document {number}"
        objects += _objects(document, where)
    jobs = [obj for obj in objects if _is_job(obj)]
    if not objects:
        raise Refused(f"{name}: the manifest is empty")
    if not jobs:
        kinds = ", ".join(sorted({f"{obj['kind']} ({obj['apiVersion']})" for obj in objects}))
        raise Refused(f"{name}: no {KIND} of {GROUP} in it, only {kinds}")
    if len(jobs) > 1:
        names = ", ".join(job["metadata"]["name"] for job in jobs)
        raise Refused(f"{name}: {len(jobs)} jobs in it ({names}); run follows one: use a file for each")
    return Manifest(tuple(objects), jobs[0])


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return f": {problem}"
    return f" in line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _objects(document: object, where: str) -> list[Object]:
    if not isinstance(document, dict):
        raise Refused(f"{where}: not a Kubernetes object, but {_describe(document)}")
    for field in ("apiVersion", "kind"):
        if not isinstance(document.get(field), str) or not document[field]:
            raise Refused(f"{where}: {field} is missing")
    if document["kind"] == "List" and isinstance(document.get("items"), list):
        items = enumerate(document["items"], 1)
        return [obj for i, item in items for obj in _objects(item, f"{where}, item {i}")]
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise Refused(f"{where}: metadata.name is missing")
    if not isinstance(metadata["name"], str):
        raise Refused(f"{where}: metadata.name must be a string, got {metadata['name']!r}; quote it")
    return [document]


def _describe(document: object) -> str:
    kinds = {list: "a list", str: "plain text", int: "a number", float: "a number", bool: "a boolean"}
    return kinds.get(type(document), type(document).__name__)


def _is_job(obj: Object) -> bool:
    return obj["kind"] == KIND and str(obj["apiVersion"]).split("/")[0] == GROUP
