"""The Python client: starts jobs from a notebook or a program, and follows them. It needs no torch.

from springtide.client import TrainingClient

client = TrainingClient(namespace="team")
job = client.train(train, workers=(1, 8), arguments={"epochs": 10})
job.wait()
print(job.values)
"""

from __future__ import annotations

try:
    from springtide_client.client import TrainingClient
    from springtide_client.errors import (
        ClientError,
        ClusterRefused,
        JobFailed,
        JobNotFound,
        JobTimeout,
        SourceError,
    )
    from springtide_client.job import JobStatus, TrainingJob
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"springtide.client needs the extra [client] ({error}): pip install 'springtide[client]'",
        name=error.name,
    ) from error

__all__ = [
    "ClientError",
    "ClusterRefused",
    "JobFailed",
    "JobNotFound",
    "JobStatus",
    "JobTimeout",
    "SourceError",
    "TrainingClient",
    "TrainingJob",
]
