"""The dashboard's rows. Metric names stand here in full: a test compares them with what the code serves."""

from __future__ import annotations

from deploy.grafana.checkpoints import CHECKPOINTS
from deploy.grafana.panels import JOB, NAME, PER_JOB, Panel, Row, greatest, per_second, quantiles, total
from deploy.grafana.servers import SERVERS, UPDATES
from deploy.grafana.traces import TRACES
from deploy.grafana.trackers import TRACKERS

JOBS = Row(
    "Jobs",
    (
        Panel(
            "Jobs by state",
            (("max by (state) (springtide_jobs)", "{{state}}"),),
            about="Over all namespaces. Each replica of the operator counts them, hence the maximum.",
            marks=True,
        ),
        Panel(
            "Workers that ended early",
            (
                (
                    f"max by ({PER_JOB}, reason) (springtide_job_restarts_total{{{JOB}}})",
                    NAME + " {{reason}}",
                ),
            ),
            about="failure: against backoffLimit. preemption: evicted, deleted, lost node. ignored: by rule.",
            marks=True,
        ),
        Panel(
            "Last recovery",
            ((greatest("springtide_job_last_recovery_seconds"), NAME),),
            unit="s",
            about="Last commit before the last change of workers to the first commit after it.",
        ),
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
            "Workers wanted, there, training",
            (
                (greatest("springtide_job_workers", f"{PER_JOB}, state"), NAME + " {{state}}"),
                (greatest("springtide_job_standbys", f"{PER_JOB}, state"), NAME + " standbys {{state}}"),
            ),
            about="As the operator sees pods: desired, existing, ready, active.",
            marks=True,
        ),
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
                (greatest("springtide_coordinator_generation_members"), NAME),
                (greatest("springtide_coordinator_streams"), NAME + " open streams"),
            ),
            about="Processes that train together; streams of workers and servers that are open.",
            marks=True,
        ),
        Panel(
            "Dropped steps",
            (
                (per_second("springtide_worker_dropped_steps_total"), NAME),
                (per_second("springtide_worker_salvaged_samples_total"), NAME + " samples kept"),
            ),
            unit="ops",
            about="Bodies that were left because the members changed, and samples of them that did not have "
            "to be computed again.",
        ),
        Panel(
            "Processes of pods that have several",
            (
                (total("springtide_launcher_processes"), NAME + " run"),
                (total("springtide_launcher_process_restarts_total"), NAME + " started again"),
            ),
            about="With processesPerPod above 1: one that ends is started again within its pod.",
            marks=True,
        ),
        Panel(
            "Coordinator",
            (
                (greatest("springtide_coordinator_incarnation_number"), NAME + " number"),
                (
                    greatest("springtide_coordinator_incarnation_restarts"),
                    NAME + " restarts of its container",
                ),
            ),
            about="A new number is a new pod. Workers train on meanwhile.",
            marks=True,
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
            about="New generations that committed: start, failure, join, leave, consistency.",
            marks=True,
        ),
        Panel(
            "Seconds from last commit to first commit",
            quantiles("springtide_coordinator_recovery_seconds"),
            unit="s",
            about="What a change of members cost.",
        ),
        Panel(
            "Time lost by cause",
            (
                (
                    f"sum by ({PER_JOB}, cause) "
                    f"(rate(springtide_coordinator_lost_seconds_total{{{JOB}}}[$__rate_interval]))",
                    NAME + " {{cause}}",
                ),
            ),
            unit="percentunit",
            about="Share of wall time. Between steps: failure, rescale, checkpoint. Within: data, straggler.",
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
            (
                (greatest("springtide_coordinator_generation"), NAME),
                (f"min by ({PER_JOB}) (springtide_worker_generation{{{JOB}}})", NAME + " last worker"),
            ),
            about="Rises by one with every change of members. A worker that stays behind is cut off.",
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
            (
                (per_second("springtide_worker_state_transfer_bytes_total"), NAME),
                (per_second("springtide_worker_state_transfer_kept_bytes_total"), NAME + " kept"),
            ),
            unit="Bps",
            about="kept: did not move again after its sender was lost.",
        ),
    ),
)

TIMES = Row(
    "Step and communication time",
    (
        Panel(
            "Step time",
            (
                *quantiles("springtide_worker_step_seconds"),
                (greatest("springtide_coordinator_step_seconds"), NAME + " from commit to commit"),
            ),
            unit="s",
            about="From the body's begin to its commit; the job's mean from commit to commit.",
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
        Panel(
            "Communication",
            quantiles("springtide_worker_communication_seconds"),
            unit="s",
            about="From the first reduction's begin to the last one's end, hidden or not.",
        ),
    ),
)

SHARDS = Row(
    "Shards",
    (
        Panel(
            "Optimizer state by worker",
            ((f"springtide_worker_optimizer_bytes{{{JOB}}}", NAME + " {{pod}}"),),
            unit="bytes",
            about="The bytes that each worker holds; all workers together hold two copies.",
        ),
        Panel(
            "Memory of a worker, without activations",
            (
                (greatest("springtide_worker_memory_estimate_bytes"), NAME + " needed"),
                (greatest("springtide_worker_memory_limit_bytes"), NAME + " limit"),
            ),
            unit="bytes",
            about="What a process needs for parameters, gradients and the optimizer's state at the present"
            " size, and what it may take.",
        ),
        Panel(
            "Wait for values",
            quantiles("springtide_worker_values_seconds"),
            unit="s",
            about="For values that other workers step: the part that overlapping did not hide.",
        ),
        Panel(
            "Wait for values by worker",
            (
                (
                    f"rate(springtide_worker_values_seconds_sum{{{JOB}}}[$__rate_interval])"
                    f" / rate(springtide_worker_values_seconds_count{{{JOB}}}[$__rate_interval])",
                    NAME + " {{pod}}",
                ),
            ),
            unit="s",
            about="Per step, the mean of each worker: one that waits longer than the others is farther away.",
        ),
    ),
)

SHARES = Row(
    "Where time goes",
    (
        Panel(
            "Overlap",
            ((greatest("springtide_worker_overlap_ratio"), NAME),),
            unit="percentunit",
            about="Part of the communication that computing hid, of the best worker.",
        ),
        Panel(
            "Bytes reduced",
            ((per_second("springtide_worker_reduced_bytes_total"), NAME),),
            unit="Bps",
            about="Gradients that workers put into reductions.",
        ),
        Panel(
            "Fetching samples",
            quantiles("springtide_worker_data_seconds"),
            unit="s",
            about="Part of compute: what a faster data source would save.",
        ),
        Panel(
            "Slowest worker",
            ((greatest("springtide_coordinator_slowest_worker_ratio"), NAME),),
            about="Its time per step over the others' median; status.slowWorker names it. 1: nobody is slow.",
        ),
        Panel(
            "Parts of a batch",
            tuple(
                (f"{which} by ({PER_JOB}) (springtide_worker_batch_share{{{JOB}}})", f"{NAME} {said}")
                for which, said in (("max", "largest"), ("min", "smallest"))
            ),
            unit="percentunit",
            about="What falls to a worker, by its measured speed. Equal lines: parts are even.",
        ),
        Panel(
            "Computing per sample",
            tuple(
                (f"{which} by ({PER_JOB}) (springtide_worker_sample_seconds{{{JOB}}})", f"{NAME} {said}")
                for which, said in (("max", "slowest"), ("min", "fastest"))
            ),
            unit="s",
            about="Of a worker, without waits and loading: what parts follow.",
        ),
    ),
)

OPERATOR = Row(
    "Operator",
    (
        Panel(
            "Acting",
            (("springtide_operator_acting", "{{pod}}"),),
            about="1 for the one operator that holds the Lease.",
            marks=True,
        ),
        Panel(
            "Reconciles",
            (
                (
                    "sum by (result) (rate(springtide_operator_reconciles_total[$__rate_interval]))",
                    "{{result}}",
                ),
            ),
            unit="ops",
            about="Rounds of planning for a job.",
        ),
        Panel(
            "Time of a reconcile",
            tuple(
                (
                    f"histogram_quantile({q}, sum by (le) "
                    f"(rate(springtide_operator_reconcile_seconds_bucket[$__rate_interval])))",
                    f"p{round(q * 100)}",
                )
                for q in (0.5, 0.99)
            ),
            unit="s",
            about="Planning, writing status, carrying out actions.",
        ),
        Panel(
            "Actions by kind",
            (("sum by (kind) (rate(springtide_operator_actions_total[$__rate_interval]))", "{{kind}}"),),
            unit="ops",
        ),
        Panel(
            "API errors by code",
            (("sum by (code) (rate(springtide_operator_api_errors_total[$__rate_interval]))", "{{code}}"),),
            unit="ops",
            about="404 and 409 are part of normal work; 403 is a missing right; 0 is no answer.",
        ),
        Panel(
            "Replicas that are scraped",
            (
                ("count(springtide_operator_acting)", "operators"),
                ("max(springtide_operator_nodes_readable)", "nodes readable"),
                ('max(springtide_operator_nodes{state="lost"})', "nodes that look lost"),
                ("max by (why) (springtide_operator_brake)", "brake: {{why}}"),
            ),
            about="Without nodes (watchNamespaces) lost ones are heard of only through their pods.",
            marks=True,
        ),
    ),
)

ROWS = (
    JOBS,
    WORKERS,
    RECOVERIES,
    RESCALING,
    CHECKPOINTS,
    TIMES,
    SHARES,
    SHARDS,
    SERVERS,
    UPDATES,
    TRACKERS,
    TRACES,
    OPERATOR,
)
