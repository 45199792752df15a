"""`make pictures`: the dashboard's pictures in docs/pictures/, from a run that is disturbed.

    python -m docs.site.pictures          run the demo beside a Prometheus, keep what it measured, draw
    python -m docs.site.pictures draw     draw again what is kept

docs/pictures/dashboard.json has the points, the events and the date of the run; the pictures follow from it
and from the dashboard, so a test holds them to both. Prometheus has to be on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from docs.site.panels import compact, panel_of, picture, rows
from springtide_demo.svg import Mark

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
BOARD = ROOT / "deploy" / "grafana" / "springtide.json"
OUT = "build/pictures"
# Rows of the dashboard, and the names of their pictures.
ROWS = {
    "Jobs": "jobs",
    "Workers and generations": "workers",
    "Recoveries": "recoveries",
    "Rescaling timeline": "rescaling",
    "Step and communication time": "steps",
}


def kept(out: Path, board: dict[str, Any]) -> dict[str, Any]:
    """Return what dashboard.json keeps of a run.

    Args:
        out: the folder of the demo.
        board: the dashboard's JSON.
    """
    answers = json.loads((out / "panels.json").read_text())
    report = json.loads((out / "report.json").read_text())
    begin = report["first_commit_unix"] - answers["from"]
    return {
        "date": datetime.fromtimestamp(answers["from"], UTC).strftime("%Y-%m-%d"),
        "seconds": round(answers["to"] - answers["from"], 1),
        "events": [
            {"kind": event["kind"], "at": round(begin + event["at_seconds"], 1)} for event in report["events"]
        ],
        "panels": compact(board, answers, list(ROWS)),
    }


def drawn(data: dict[str, Any], board: dict[str, Any]) -> dict[str, str]:
    """Return {name of a picture's file: its text}.

    Args:
        data: of dashboard.json.
        board: the dashboard's JSON.
    """
    marks = [Mark(event["at"], event["kind"]) for event in data["events"]]
    found = {}
    for title, name in ROWS.items():
        panels = [panel_of(panel, data["panels"].get(panel["title"], [])) for panel in rows(board)[title]]
        found[f"dashboard-{name}.svg"] = picture(title, panels, marks, data["seconds"])
    return found


def main(command: str = "run") -> int:
    """Write the pictures, after a run unless they are only to be drawn again; return the exit code."""
    board = json.loads(BOARD.read_text())
    file = FOLDER / "dashboard.json"
    if command == "run":
        if shutil.which("prometheus") is None:
            print("pictures: no prometheus on PATH (Debian: apt-get install prometheus)", file=sys.stderr)
            return 1
        demo = [sys.executable, "-m", "springtide_demo", "--out", OUT]
        if code := subprocess.run(
            demo, cwd=ROOT, env={**os.environ, "PROMETHEUS": "1"}, check=False
        ).returncode:
            print(f"pictures: the demo ended with {code}", file=sys.stderr)
            return code
        FOLDER.mkdir(exist_ok=True)
        lines = json.dumps(kept(ROOT / OUT, board), ensure_ascii=False, separators=(",", ":"))
        file.write_text(lines.replace('{"name"', '\n{"name"') + "\n")
    for name, text in drawn(json.loads(file.read_text()), board).items():
        (FOLDER / name).write_text(text)
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
