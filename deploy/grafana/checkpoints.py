"""The dashboard's row about checkpoints."""

from __future__ import annotations

from deploy.grafana.panels import JOB, NAME, PER_JOB, Panel, Row, greatest, per_second, quantiles

CHECKPOINTS = Row(
    "Checkpoints",
    (
        Panel(
            "Age of the newest checkpoint",
            ((greatest("springtide_coordinator_checkpoint_age_seconds"), NAME),),
            unit="s",
            about="What would be trained again if all workers were lost now.",
        ),
        Panel(
            "Checkpoints completed and failed",
            (
                (
                    f"sum by ({PER_JOB}, result) "
                    f"(increase(springtide_coordinator_checkpoints_total{{{JOB}}}[$__rate_interval]))",
                    NAME + " {{result}}",
                ),
            ),
            about="Failed: the condition Degraded says why. Training goes on.",
            marks=True,
        ),
        Panel(
            "Standstill for the copy",
            quantiles("springtide_worker_checkpoint_stall_seconds"),
            unit="s",
            about="What a step waits for; the rest is written beside training.",
        ),
        Panel(
            "Time to write a share",
            quantiles("springtide_worker_checkpoint_seconds"),
            unit="s",
            about="The first member's is that of the whole checkpoint.",
        ),
        Panel(
            "Bytes written",
            ((per_second("springtide_worker_checkpoint_bytes_total"), NAME),),
            unit="Bps",
            about="Of all workers.",
        ),
        Panel(
            "Failures seen by workers",
            ((per_second("springtide_worker_checkpoint_failures_total"), NAME),),
            unit="ops",
            about="Shares that could not be written, and checkpoints that could not be completed.",
        ),
    ),
)
