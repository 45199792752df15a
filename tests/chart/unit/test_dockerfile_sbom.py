"""Bills of materials and lists of licences (deploy/sbom.py)."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from chart_render import ROOT
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.requirements import IMAGES, read_lock
from deploy.sbom import UNKNOWN, Part, bill, debian, installed, licence, licences, locked, main, normalized

PARTS = [
    Part("kopf", "1.45.0", "pypi", "MIT", ("aiohttp", "not-here"), ("0" * 64,), ("kopf/LICENSE",)),
    Part("aiohttp", "3.14.5", "pypi", "Apache-2.0 AND MIT"),
    Part("odd", "1", "pypi", "Our own words"),
    Part("silent", "1", "pypi", UNKNOWN),
    Part("libc6", "2.36-9+deb12u14", "deb", "see /usr/share/doc/libc6/copyright"),
]
# Copyleft that reaches what is linked with it; MPL-2.0 (certifi) is about its own files.
UNWANTED = ("GPL", "AGPL", "SSPL", "BUSL")
# What the images hold, but this environment does not: builds of torch for GPUs.
ELSEWHERE = ("triton", "nvidia-", "cuda-")


def test_bill_is_valid_cyclonedx() -> None:
    text = bill("operator", "0.1.0", PARTS)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = json.loads(text)
    assert told["metadata"]["component"]["name"] == "operator"
    components = {item["name"]: item for item in told["components"]}
    assert components["kopf"]["purl"] == "pkg:pypi/kopf@1.45.0"
    assert components["kopf"]["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    assert components["kopf"]["licenses"] == [{"license": {"id": "MIT"}}]
    assert components["aiohttp"]["licenses"][0]["expression"] == "Apache-2.0 AND MIT"
    assert components["odd"]["licenses"][0]["license"]["name"] == "Our own words"
    assert "licenses" not in components["silent"]
    assert components["libc6"]["purl"].startswith("pkg:deb/debian/libc6@2.36-9")
    needs = {item["ref"]: item.get("dependsOn", []) for item in told["dependencies"]}
    assert needs["pkg:pypi/kopf@1.45.0"] == ["pkg:pypi/aiohttp@3.14.5"]


def test_equal_parts_make_an_equal_bill() -> None:
    text = bill("operator", "0.1.0", PARTS)
    assert bill("operator", "0.1.0", list(reversed(PARTS))) == text
    other = bill("operator", "0.1.0", PARTS[1:])
    assert json.loads(other)["serialNumber"] != json.loads(text)["serialNumber"]


def test_list_names_licence_and_file() -> None:
    lines = licences("operator", PARTS).splitlines()
    at = lines.index("kopf 1.45.0: MIT")
    assert lines[at + 1] == "    kopf/LICENSE"
    assert "libc6 2.36-9+deb12u14: see /usr/share/doc/libc6/copyright" in lines


@pytest.mark.parametrize(
    ("name", "expression", "field", "classifiers", "said"),
    [
        ("a", "MIT OR Apache-2.0", "BSD", [], "MIT OR Apache-2.0"),
        ("a", "", "Apache 2.0", [], "Apache-2.0"),
        ("a", "", "BSD", ["License :: OSI Approved :: BSD License"], "BSD"),
        ("a", "", "", ["License :: OSI Approved :: MIT License"], "MIT"),
        ("a", "", "Copyright (c) 2001\nand so on", ["License :: OSI Approved :: BSD License"], "BSD License"),
        ("cel-python", "", "", [], "Apache-2.0"),
        ("a", "", "", [], UNKNOWN),
    ],
)
def test_declared_licence(name: str, expression: str, field: str, classifiers: list[str], said: str) -> None:
    told = {"name": name, "license_expression": expression, "license": field, "classifier": classifiers}
    assert licence(told) == said


def test_every_distribution_of_an_image_has_shippable_licence() -> None:
    here = {part.name: part for part in installed(sys.path)}
    pins = [*read_lock((ROOT / "deploy/locks/images.txt").read_text())]
    pins += [
        pin
        for pin in read_lock((ROOT / "deploy/locks/torch.txt").read_text())
        if not pin.name.startswith(ELSEWHERE)
    ]
    for pin in pins:
        part = here[pin.name]
        assert part.licence != UNKNOWN, pin.name
        words = part.licence.replace("(", " ").replace(")", " ").split()
        assert not [word for word in words if word.upper().startswith(UNWANTED)], (pin.name, part.licence)


def test_packages_of_debian_are_read() -> None:
    status = (
        "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\nDescription: C\n more: words\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    assert [(part.name, part.version) for part in debian(status)] == [("libc6", "2.36-9")]


def test_locks_make_the_same_parts_as_an_image() -> None:
    names = {image: {part.name for part in locked(ROOT, image, {})} for image in (*IMAGES, "worker-plain")}
    assert "torch" in names["worker-plain"]
    assert {"scikit-learn"} == {"scikit-learn"} & (names["worker"] - names["worker-plain"])
    assert "torch" not in names["operator"]
    assert names["operator"] | names["ps"] <= names["all"]
    kopf = next(part for part in locked(ROOT, "operator", {}) if part.name == "kopf")
    assert kopf.version == version("kopf")
    assert kopf.hashes


@pytest.mark.slow
def test_image_leaves_its_tool_out(tmp_path: Path) -> None:
    main(["image", "mine", "--library", str(tmp_path / "nothing"), "--out", str(tmp_path)])
    told = json.loads((tmp_path / "mine.cdx.json").read_text())
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(told)) is None
    found = {item["name"] for item in told["components"]}
    assert {"springtide", "torch", normalized("PyYAML")} <= found
    assert (tmp_path / "mine.licences.txt").read_text().startswith("What the image mine holds")
