"""Files made from the chart are the ones in the repository, and say what they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from chart_render import KUBERNETES_VERSIONS, ROOT, kinds, parse, pick, schema_errors

from charts import generate, values_docs


def test_generated_files_are_up_to_date(require_tool: Callable[[str], str]) -> None:
    require_tool("helm")
    stale = [
        str(path.relative_to(ROOT)) for path, text in generate.files().items() if path.read_text() != text
    ]
    if (ROOT / "deploy" / "operator.yaml").read_text() != generate.operator_manifest():
        stale.append("deploy/operator.yaml")
    assert stale == [], "run: python charts/generate.py"


def test_check_finds_a_difference_and_writes_nothing(
    require_tool: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_tool("helm")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "values.md").write_text("old")
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "operator.yaml").write_text(generate.operator_manifest())
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "files", lambda: {tmp_path / "docs" / "values.md": "new"})
    assert generate.main(["--check"]) == 1
    assert "differs: docs/values.md" in capsys.readouterr().out
    assert (tmp_path / "docs" / "values.md").read_text() == "old"
    assert generate.main([]) == 0
    assert (tmp_path / "docs" / "values.md").read_text() == "new"
    assert generate.main(["--check"]) == 0


def test_plain_manifest_stands_alone() -> None:
    text = (ROOT / "deploy" / "operator.yaml").read_text()
    objects = parse(text)
    for obj in objects:
        for version in KUBERNETES_VERSIONS:
            assert schema_errors(obj, version) == []
    assert "CustomResourceDefinition" not in kinds(objects)
    assert "Pod" not in kinds(objects)
    assert (
        pick(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    )
    assert objects[0]["kind"] == "Namespace"
    assert "helm" not in text.lower().replace("without helm", "")
    assert (
        pick(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
        == "springtide/operator:0.1.0"
    )


def test_descriptions_join_lines_and_know_their_path() -> None:
    text = "a:\n  # -- First,\n  # and more.\n  b: 1\n  c:\n    # -- Deep.\n    d: x\n"
    text += "# plain comment\ne: 2\n# -- Last.\nf: 3\n"
    assert values_docs.descriptions(text) == {"a.b": "First, and more.", "a.c.d": "Deep.", "f": "Last."}


def test_value_without_description_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no comment beginning with `# --` above a\.c"):
        values_docs.table(
            "a:\n  # -- B.\n  b: 1\n  c: 2\n",
            '{"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}',
        )


def test_value_unknown_to_the_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know a"):
        values_docs.table("# -- A.\na: 1\n", '{"properties": {}}')


def test_kustomization_takes_everything(require_tool: Callable[[str], str]) -> None:
    import subprocess

    done = subprocess.run(
        [require_tool("kubectl"), "kustomize", str(ROOT / "deploy")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = {(o["kind"], o["metadata"]["name"]) for o in parse(done.stdout)}
    expected = parse((ROOT / "deploy" / "operator.yaml").read_text())
    expected += [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy" / "crd").glob("*.yaml")]
    assert built == {(o["kind"], o["metadata"]["name"]) for o in expected}
