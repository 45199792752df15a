"""All objects of the jobs of one operator: what their manifests need beside the job itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.manifests.coordinator import coordinator_pod, secret
from springtide_operator.manifests.defaults import PodDefaults, on_linux, with_defaults
from springtide_operator.manifests.protection import Doors, network_policy
from springtide_operator.manifests.server import CONTAINER as SERVER_CONTAINER
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import main_container_name, worker_pod

Object = dict[str, Any]


@dataclass(frozen=True)
class ManifestMaker:
    """Makes the objects of one job.

    Attributes:
        credentials: gives what the job's processes show each other.
        certificate_seconds: for which certificates are valid.
        doors: who may reach the job's pods; None: no NetworkPolicy is made.
    """

    credentials: Callable[[Job], JobCredentials]
    coordinator_image: str
    pull_policy: str = "IfNotPresent"
    server_image: str = names.PARAMETER_SERVER_IMAGE
    defaults: PodDefaults = field(default_factory=PodDefaults)
    doors: Doors | None = None
    certificate_seconds: float = 7_776_000.0

    def secret(self, job: Job) -> Object:
        """The Secret with the token of the newest key, and with its certificate where the job has TLS."""
        data = self.credentials(job).secret_data(job.keys[0], job.tls, self.certificate_seconds)
        return secret(job, data)

    def network_policy(self, job: Job) -> Object | None:
        """The NetworkPolicy of the job; None where none is made."""
        return None if self.doors is None else network_policy(job, self.doors)

    def coordinator(self, job: Job, incarnation: int, avoid: str | None = None, image: str = "") -> Object:
        """Return the coordinator's pod.

        Args:
            job: the TrainingJob.
            incarnation: its number.
            avoid: a node that it must not be on; None: any.
            image: unless the job names one; "": the operator's own.
        """
        own = self.credentials(job).operator_token
        image = image or self.coordinator_image
        pod = coordinator_pod(job, incarnation, image, self.pull_policy, avoid, own)
        return on_linux(with_defaults(pod, self.defaults, names.ROLE_COORDINATOR))

    def worker(self, job: Job, slot: int, attempt: int, address: str, avoid: str | None = None) -> Object:
        """Return a worker's pod.

        Args:
            job: the TrainingJob.
            slot: which of the wanted pods it is, from 0.
            attempt: number of the pod among those of the slot, from 0.
            address: of the coordinator's Service.
            avoid: a node that it must not be on; None: any.

        Raises:
            TemplateError: no pod can be made of the template.
        """
        pod = worker_pod(job, slot, attempt, address, avoid)
        return on_linux(with_defaults(pod, self.defaults, main_container_name(job.spec.workers.template)))

    def server(self, job: Job, slot: int, attempt: int, address: str, image: str = "") -> Object:
        """Return a parameter server's pod.

        Args:
            job: the TrainingJob.
            slot: which of the wanted pods it is, from 0.
            attempt: number of the pod among those of the slot, from 0.
            address: of the coordinator's Service.
            image: unless the job names one; "": the operator's own.

        Raises:
            TemplateError: no pod can be made of the template.
        """
        pod = server_pod(job, slot, attempt, address, image or self.server_image, self.pull_policy)
        return on_linux(with_defaults(pod, self.defaults, SERVER_CONTAINER))
