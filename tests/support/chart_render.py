"""Render the Helm chart for tests, and check what comes out as the API server would."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import referencing
import yaml
from required import require_tool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "springtide"
VALUE_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
# The oldest that is promised, and the newest that the schemas know.
KUBERNETES_VERSIONS = ("1.29.0", "1.37.0")
MONITORING = tuple(
    f"monitoring.coreos.com/v1/{kind}" for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
)

Object = dict[str, Any]


class HelmError(Exception):
    """helm refused; the text is what it said."""


class _NoDuplicates(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which a key given twice is an error, as it is for the API server's strict decoding."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"keys given twice: {sorted(twice)}", node.start_mark
            )
        return super().construct_mapping(node, deep)


def helm(*args: str, stdin: str | None = None, timeout: float = 60) -> str:
    """Run helm and return its output. Raises HelmError."""
    done = subprocess.run(
        [require_tool("helm"), *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise HelmError(done.stderr.strip())
    return done.stdout


@functools.cache
def _template(chart: Path, args: tuple[str, ...], stdin: str | None) -> str:
    return helm("template", args[0], str(chart), *args[1:], stdin=stdin)


def render_text(
    values: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    release: str = "springtide",
    namespace: str = "springtide-system",
    api_versions: tuple[str, ...] = (),
    chart: Path = CHART,
) -> str:
    """`helm template`, once for equal arguments. Raises HelmError."""
    args = [release, "--namespace", namespace]
    for version in api_versions:
        args += ["--api-versions", version]
    if file is not None:
        args += ["--values", str(file)]
    if values is not None:
        args += ["--values", "-"]
    return _template(chart, tuple(args), json.dumps(values) if values is not None else None)


def render_notes(folder: Path, values: Mapping[str, Any] | None = None, **options: Any) -> str:
    """NOTES.txt, which `helm template` leaves out: rendered as data in a copy of the chart below `folder`."""
    chart = folder / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        (chart / "templates" / "NOTES.txt").rename(chart / "files" / "NOTES.txt")
        text = '{{ tpl (.Files.Get "files/NOTES.txt") . | toJson }}'
        (chart / "templates" / "notes.yaml").write_text(
            f"{{kind: Notes, metadata: {{name: notes}}, text: {text}}}"
        )
    return str(pick(parse(render_text(values, chart=chart, **options)), "Notes")["text"])


def parse(text: str) -> list[Object]:
    """Objects of a YAML stream; a key given twice is an error."""
    return [item for item in yaml.load_all(text, Loader=_NoDuplicates) if item]


def render(values: Mapping[str, Any] | None = None, **options: Any) -> list[Object]:
    """Objects that the chart makes from the values. Raises HelmError."""
    return parse(render_text(values, **options))


def pick(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of that kind (and name)."""
    found = [o for o in objects if o["kind"] == kind and (name is None or o["metadata"]["name"] == name)]
    if len(found) != 1:
        names = [f"{o['kind']}/{o['metadata']['name']}" for o in objects]
        raise AssertionError(f"{len(found)} objects are {kind}/{name or '*'}, not one, among {names}")
    return found[0]


def kinds(objects: list[Object]) -> set[str]:
    return {o["kind"] for o in objects}


@functools.cache
def _definitions(version: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    return folder, referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    folder, definitions = _definitions(version)
    group, _, rest = api_version.rpartition("/")
    short = f"{group.split('.')[0]}-{rest}" if group else rest
    file = folder / f"{kind.lower()}-{short}.json"
    if not file.is_file():
        return None
    schema = referencing.Resource.from_contents(json.loads(file.read_text()))
    registry = schema @ (definitions @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


def schema_errors(obj: Object, version: str) -> list[str]:
    """Return Kubernetes' errors about a built-in object, unknown fields included; raise LookupError for a
    kind that this version does not have.
    """
    validator = _validator(version, obj["apiVersion"], obj["kind"])
    if validator is None:
        raise LookupError(f"Kubernetes {version} has no {obj['apiVersion']} {obj['kind']}")
    return [f"{'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(obj)]
