"""The dashboard's row about experiment trackers."""

from __future__ import annotations

from deploy.grafana.panels import JOB, NAME, PER_JOB, Panel, Row, greatest

_PER_TRACKER = f"{PER_JOB}, tracker"

TRACKERS = Row(
    "Experiment trackers",
    (
        Panel(
            "Commits that wait for a tracker",
            ((greatest("springtide_worker_tracker_waiting_commits", _PER_TRACKER), NAME + " {{tracker}}"),),
            about="At the worker that writes. The last 4,096 are kept for a tracker that does not answer.",
        ),
        Panel(
            "Calls of trackers that failed, commits that none took",
            tuple(
                (
                    f"sum by ({_PER_TRACKER}) (increase({metric}{{{JOB}}}[$__rate_interval]))",
                    f"{NAME} {{{{tracker}}}} {said}",
                )
                for metric, said in (
                    ("springtide_worker_tracker_failures_total", "failed"),
                    ("springtide_worker_tracker_lost_commits_total", "lost"),
                )
            ),
            about="A call that failed is made again. Training never waits for a tracker.",
            marks=True,
        ),
    ),
)
