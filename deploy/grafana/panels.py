"""Parts of a dashboard: rows of graphs, each with its queries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One graph: queries as (PromQL, legend), unit in Grafana's names; `marks` draws steps, not slopes."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    marks: bool = False


@dataclass(frozen=True)
class Row:
    """Panels about one thing."""

    title: str
    panels: tuple[Panel, ...]


# Chosen by the variables at the top of the dashboard.
JOB = 'job_namespace=~"$namespace",training_job=~"$training_job"'
NAME = "{{job_namespace}}/{{training_job}}"
PER_JOB = "job_namespace, training_job"


def quantiles(metric: str, of: tuple[float, ...] = (0.5, 0.99)) -> tuple[tuple[str, str], ...]:
    """Queries for quantiles of a histogram over the workers of each job."""
    by = f"le, {PER_JOB}"
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{{{JOB}}}[$__rate_interval])))",
            f"{NAME} p{round(q * 100)}",
        )
        for q in of
    )


def per_second(metric: str, by: str = PER_JOB, labels: str = JOB) -> str:
    """The rate of a counter, summed."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def greatest(metric: str, by: str = PER_JOB) -> str:
    """The greatest value of a gauge per job: two pods may serve it for a moment while one takes over."""
    return f"max by ({by}) ({metric}{{{JOB}}})"


def total(metric: str, by: str = PER_JOB) -> str:
    """The sum over a job's pods."""
    return f"sum by ({by}) ({metric}{{{JOB}}})"
