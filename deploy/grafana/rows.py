"""The dashboard's rows. Metric names stand here in full: a test compares them with what the code serves."""

from __future__ import annotations

from deploy.grafana.panels import JOB, NAME, PER_JOB, Panel, Row, greatest, per_second, quantiles

JOBS = Row(
    "Jobs",
    (
        Panel(
            "Step",
            ((greatest("springtide_coordinator_step"), NAME),),
            about="Newest committed step.",
        ),
        Panel(
            "Samples per second",
            (
                (
                    greatest("springtide_coordinator_samples_per_second"),
                    NAME,
                ),
            ),
            about="Of all workers together.",
        ),
        Panel(
            "Goodput",
            (
                (
                    greatest("springtide_coordinator_goodput_ratio"),
                    NAME,
                ),
            ),
            unit="percentunit",
            about="Time spent on steps that survive, divided by wall time.",
        ),
    ),
)

WORKERS = Row(
    "Workers and generations",
    (
        Panel(
            "Worker processes by standing",
            (
                (
                    greatest("springtide_coordinator_members", f"{PER_JOB}, standing"),
                    NAME + " {{standing}}",
                ),
            ),
            about="starting: no model yet. parked: waits. active: trains. ended, after: the loop is over.",
            marks=True,
        ),
        Panel(
            "Members of the generation",
            (
                (
                    greatest("springtide_coordinator_generation_members"),
                    NAME,
                ),
            ),
            about="Processes that train together.",
            marks=True,
        ),
        Panel(
            "Dropped steps",
            ((per_second("springtide_worker_dropped_steps_total"), NAME),),
            unit="ops",
            about="Bodies that were left because the members changed; their samples are dealt again.",
        ),
    ),
)

RECOVERIES = Row(
    "Recoveries",
    (
        Panel(
            "Recoveries by cause",
            (
                (
                    f"sum by ({PER_JOB}, cause) "
                    f"(increase(springtide_coordinator_recoveries_total{{{JOB}}}[$__rate_interval]))",
                    NAME + " {{cause}}",
                ),
            ),
            about="New generations that committed: start, failure, join, leave.",
            marks=True,
        ),
        Panel(
            "Seconds from last commit to first commit",
            quantiles("springtide_coordinator_recovery_seconds"),
            unit="s",
            about="What a change of members cost.",
        ),
        Panel(
            "State lost",
            (
                (
                    greatest("springtide_coordinator_states_lost_total"),
                    NAME,
                ),
            ),
            about="Times that no process with the job's state survived. More than 0 means work was repeated.",
            marks=True,
        ),
    ),
)

RESCALING = Row(
    "Rescaling timeline",
    (
        Panel(
            "Generation",
            ((greatest("springtide_coordinator_generation"), NAME),),
            about="Rises by one with every change of members.",
            marks=True,
        ),
        Panel(
            "State transfers",
            ((per_second("springtide_worker_state_transfers_total"), NAME),),
            unit="ops",
            about="Joiners receive parameters, optimizer and cursor from a member that has them.",
        ),
        Panel(
            "Bytes of state transferred",
            ((per_second("springtide_worker_state_transfer_bytes_total"), NAME),),
            unit="Bps",
        ),
    ),
)

TIMES = Row(
    "Step and communication time",
    (
        Panel(
            "Step time",
            quantiles("springtide_worker_step_seconds"),
            unit="s",
            about="From the body's begin to its commit.",
        ),
        Panel(
            "Compute", quantiles("springtide_worker_compute_seconds"), unit="s", about="Forward and backward."
        ),
        Panel(
            "Exposed communication",
            quantiles("springtide_worker_exposed_communication_seconds"),
            unit="s",
            about="Waiting for reductions after backward: what overlapping did not hide.",
        ),
    ),
)

ROWS = (JOBS, WORKERS, RECOVERIES, RESCALING, TIMES)
