"""The dashboard's rows on parameter servers: who is there, what moves, what is held."""

from __future__ import annotations

from deploy.grafana.panels import JOB, NAME, PER_JOB, Panel, Row, greatest, per_second, quantiles, total

SERVERS = Row(
    "Parameter servers",
    (
        Panel(
            "Servers wanted, there, ready",
            ((greatest("springtide_job_parameter_servers", f"{PER_JOB}, state"), NAME + " {{state}}"),),
            about="One that is missing is waited for where no other has copies of what it held.",
            marks=True,
        ),
        Panel(
            "Servers connected, in the generation",
            (
                (greatest("springtide_coordinator_servers"), NAME + " connected"),
                (greatest("springtide_coordinator_generation_servers"), NAME + " in the generation"),
            ),
            about="Fewer connected than in the generation: one is lost.",
            marks=True,
        ),
        Panel(
            "Clients, and connections refused",
            (
                (total("springtide_ps_clients"), NAME + " clients"),
                (
                    f"sum by ({PER_JOB}) "
                    f"(increase(springtide_ps_refused_connections_total{{{JOB}}}[$__rate_interval]))",
                    NAME + " refused",
                ),
            ),
            about="Refused: without the job's token. Somebody else reaches the port.",
            marks=True,
        ),
        Panel(
            "Values held",
            (
                (total("springtide_ps_value_bytes"), NAME),
                (total("springtide_ps_offered_bytes"), NAME + " offered"),
            ),
            unit="bytes",
            about="On all servers of a job, second copies included. Offered: gradients that came before their"
            " range was pushed.",
        ),
        Panel(
            "Received and sent",
            (
                (per_second("springtide_ps_received_bytes_total"), NAME + " received"),
                (per_second("springtide_ps_sent_bytes_total"), NAME + " sent"),
            ),
            unit="Bps",
            about="By all servers of a job.",
        ),
        Panel(
            "Pushes and pulls",
            (
                (per_second("springtide_ps_pushes_total"), NAME + " pushes"),
                (per_second("springtide_ps_pulls_total"), NAME + " pulls"),
            ),
            unit="ops",
            about="What workers ask of the servers.",
        ),
    ),
)

UPDATES = Row(
    "Updates and tables on servers",
    (
        Panel(
            "Staleness",
            quantiles("springtide_worker_staleness_updates"),
            about="BoundedStaleness, Asynchronous: updates of others between a worker's pull and its push.",
        ),
        Panel(
            "Ranges applied, and repeated",
            (
                (per_second("springtide_ps_ranges_total"), NAME + " applied"),
                (per_second("springtide_ps_repeated_ranges_total"), NAME + " repeated"),
            ),
            unit="ops",
            about="Repeated: the chunk had the range's gradients already, so they were not applied again.",
        ),
        Panel(
            "Keys and rows held",
            (
                (total("springtide_ps_keys"), NAME + " keys"),
                (total("springtide_ps_table_rows"), NAME + " rows"),
            ),
            about="Dense tensors by key, and the rows of embedding tables; second copies included.",
        ),
        Panel(
            "Rows of tables",
            (
                (per_second("springtide_ps_looked_up_rows_total"), NAME + " looked up"),
                (per_second("springtide_ps_updated_rows_total"), NAME + " updated"),
                (per_second("springtide_ps_evicted_rows_total"), NAME + " evicted"),
            ),
            unit="ops",
        ),
    ),
)
