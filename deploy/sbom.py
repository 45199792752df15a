"""Write what an image holds: a bill of materials (CycloneDX 1.6, JSON) and a list of licences.

    python sbom.py image NAME --library DIR --out FOLDER    all that is installed here, Debian's packages too
    python sbom.py locks --out FOLDER                       every image, from deploy/locks/, not built

DIR holds cyclonedx-python-lib, which no image keeps. The Dockerfile runs the first, `make sbom` the second.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

DPKG_STATUS = Path("/var/lib/dpkg/status")
FILES = ("{name}.cdx.json", "{name}.licences.txt")
UNKNOWN = "not declared"

# Distributions whose metadata names no licence: what their own licence file says.
DECLARED_ELSEWHERE = {
    "cel-python": "Apache-2.0",
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
}
# Names of licences as metadata spells them, as SPDX does.
_SPDX = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "mit license": "MIT",
    "bsd 2-clause license": "BSD-2-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
}
_SPDX_ID = re.compile(r"^[A-Za-z0-9.+-]+$")
_VAGUE = {"bsd", "bsd license", "dfsg approved", "other/proprietary license"}


@dataclass(frozen=True)
class Part:
    """One thing that an image holds.

    Attributes:
        name: as its own package system spells it.
        version: installed, or pinned.
        kind: of package, as package URLs name it: "pypi" or "deb".
        licence: an SPDX expression where one is known, else the words of its metadata.
        needs: names of the parts of the same kind that it needs.
        hashes: SHA-256 of the files that it may come from.
        files: where its licence can be read.
    """

    name: str
    version: str
    kind: str
    licence: str
    needs: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def normalized(name: str) -> str:
    """Return a distribution's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(told: Mapping[str, Any]) -> str:
    """Return the licence that a distribution's metadata declares, as an SPDX expression where it is one.

    Args:
        told: its metadata, with keys as in JSON (PEP 566); the licence may be an id, words, or a whole text.
    """
    if told.get("license_expression"):
        return str(told["license_expression"])
    field = (told.get("license") or "").strip()
    short = [field] if field and "\n" not in field and len(field) < 60 else []
    classifiers = [item for item in told.get("classifier") or [] if item.startswith("License ::")]
    candidates = [*short, *(item.rpartition("::")[2].strip() for item in classifiers)]
    for word in candidates:
        known: str = _SPDX.get(word.lower(), word)
        if word.lower() not in _VAGUE and _SPDX_ID.match(known):
            return known
    said: str = next(iter(candidates), UNKNOWN)
    return DECLARED_ELSEWHERE.get(normalized(str(told["name"])), said)


def needs(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the names of distributions in requirements, sorted.

    Args:
        lines: as metadata has them.
    """
    return tuple(sorted({normalized(re.split(r"[ ;<>=!~\[(]", line)[0]) for line in lines}))


def installed(paths: list[str]) -> list[Part]:
    """Return the distributions below folders, by name.

    Args:
        paths: such as sys.path.
    """
    result: dict[str, Part] = {}
    for found in metadata.distributions(path=paths):
        told = found.metadata.json
        name = normalized(str(told["name"]))
        files = tuple(
            str(file)
            for file in found.files or []
            if re.search(r"(?i)(licen[cs]e|copying|notice)", file.name)
        )
        part = Part(name, found.version, "pypi", licence(told), needs(found.requires or []), (), files)
        result.setdefault(name, part)
    return sorted(result.values(), key=lambda part: part.name)


def debian(status: str) -> list[Part]:
    """Return the packages of a Debian system.

    Args:
        status: the text of dpkg's database.
    """
    result = []
    for block in status.split("\n\n"):
        fields = dict(
            line.partition(": ")[::2]
            for line in block.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            name = fields["Package"]
            where = f"/usr/share/doc/{name}/copyright"
            result.append(Part(name, fields["Version"], "deb", f"see {where}", (), (), (where,)))
    return sorted(result, key=lambda part: part.name)


def bill(name: str, version: str, parts: Iterable[Part]) -> str:
    """Return a bill of materials in CycloneDX's JSON; equal parts make equal text.

    Args:
        name: of the image.
        version: of the image.
        parts: what it holds.
    """
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    make = LicenseFactory()
    root = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=f"image/{name}")
    listed = sorted(parts, key=lambda part: (part.kind, part.name))
    components: dict[tuple[str, str], Component] = {}
    for part in listed:
        namespace = "debian" if part.kind == "deb" else None
        address = PackageURL(part.kind, namespace, part.name, part.version)
        known = part.kind == "pypi" and part.licence != UNKNOWN
        components[part.kind, part.name] = Component(
            name=part.name,
            version=part.version,
            type=ComponentType.LIBRARY,
            bom_ref=str(address),
            purl=address,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=item) for item in part.hashes[:1]]
            if len(part.hashes) == 1
            else [],
            licenses=[make.make_from_string(part.licence)] if known else [],
        )
    bom = Bom(components=components.values(), metadata=BomMetaData(component=root))
    bom.register_dependency(root, components.values())
    for part in listed:
        needed = [components[part.kind, need] for need in part.needs if (part.kind, need) in components]
        bom.register_dependency(components[part.kind, part.name], needed)
    text: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    # Time and chance would make each build another file: the content names itself.
    text["metadata"].pop("timestamp", None)
    text["serialNumber"] = ""
    text["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(text, sort_keys=True)).urn
    return json.dumps(text, indent=1, sort_keys=True) + "\n"


def licences(name: str, parts: Iterable[Part]) -> str:
    """Return the list of licences as text.

    Args:
        name: of the image.
        parts: what it holds.
    """
    listed = sorted(parts, key=lambda part: (part.kind, part.name))
    lines = [f"What the image {name} holds, and under which licence.", ""]
    for part in listed:
        lines.append(f"{part.name} {part.version}: {part.licence}")
        lines += [f"    {file}" for file in part.files if part.kind == "pypi"]
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, version: str, parts: list[Part]) -> None:
    """Write both files.

    Args:
        folder: where to; made if it is not there.
        name: of the image.
        version: of the image.
        parts: what it holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bom, text = (folder / file.format(name=name) for file in FILES)
    bom.write_text(bill(name, version, parts), encoding="utf-8")
    text.write_text(licences(name, parts), encoding="utf-8")
    print(f"{bom}: {len(parts)} components", file=sys.stderr)


def report(pins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what pip says of distributions, by name, from the index's metadata: nothing is installed.

    Args:
        pins: versions by name.

    Raises:
        SystemExit: if pip fails; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(
            "\n".join(f"{name}=={version}" for name, version in pins.items()) + "\n", encoding="utf-8"
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--report", f"{folder}/report.json", "-r", str(wanted)]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit("make sbom: pip found no metadata for what is locked")
        told = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))
        return {normalized(item["metadata"]["name"]): item["metadata"] for item in told["install"]}


def locked(root: Path, image: str, told: Mapping[str, dict[str, Any]]) -> list[Part]:
    """Return what the locks say that an image gets.

    Args:
        root: of the project.
        image: as the Dockerfile's targets name it.
        told: each distribution's metadata, by name.
    """
    from deploy.requirements import IMAGES, TORCH_NEEDS, read_lock, requirements

    pins = read_lock((root / "deploy/locks/images.txt").read_text(encoding="utf-8"))
    torch = read_lock((root / "deploy/locks/torch.txt").read_text(encoding="utf-8"))
    extras = IMAGES[image.removesuffix("-plain")]
    wanted = requirements((root / "pyproject.toml").read_text(encoding="utf-8"), extras)
    needs_torch = any(line.startswith("torch>") for line in wanted)
    sets = {image.removesuffix("-plain")}
    sets |= {TORCH_NEEDS} if needs_torch else set()
    sets |= {"examples"} if image in {"worker", "all"} else set()
    own = [pin for pin in pins if sets & set(pin.sets)] + (torch if needs_torch else [])
    result = []
    for pin in own:
        data = told.get(pin.name, {"name": pin.name})
        needed = needs(data.get("requires_dist", []))
        result.append(Part(pin.name, pin.version, "pypi", licence(data), needed, pin.hashes))
    return result


def main(arguments: list[str] | None = None) -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(description="write a bill of materials and a list of licences")
    commands = parser.add_subparsers(dest="command", required=True)
    image = commands.add_parser("image")
    image.add_argument("name")
    image.add_argument(
        "--library", default="", help="a folder with cyclonedx-python-lib, left out of the bill"
    )
    image.add_argument("--out", type=Path, required=True)
    locks = commands.add_parser("locks")
    locks.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.command == "image":
        paths = list(sys.path)
        if options.library:
            sys.path.insert(0, options.library)
        parts = installed(paths)
        ours = next((part.version for part in parts if part.name == "springtide"), "0")
        system = debian(DPKG_STATUS.read_text(encoding="utf-8")) if DPKG_STATUS.is_file() else []
        write(options.out, options.name, ours, parts + system)
        return
    from deploy.requirements import IMAGES, read_lock

    root = Path(__file__).resolve().parents[1]
    pins = [
        pin
        for lock in ("images", "torch")
        for pin in read_lock((root / f"deploy/locks/{lock}.txt").read_text())
    ]
    told = report({pin.name: pin.version for pin in pins})
    version = metadata.version("springtide")
    for name in (*IMAGES, "worker-plain"):
        write(options.out, name, version, locked(root, name, told))


if __name__ == "__main__":
    main()
