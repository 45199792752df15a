"""The client: makes jobs from functions and scripts, and finds them again."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from springtide_client.errors import ClientError, ClusterRefused
from springtide_client.job import TrainingJob
from springtide_client.manifest import (
    JobOptions,
    Workers,
    config_map,
    job_name,
    owned_by,
    training_job,
)
from springtide_client.packing import Arguments, pack
from springtide_client.session import Session, open_session
from springtide_kube.content_types import MERGE_PATCH
from springtide_operator.api import names

Object = dict[str, Any]


class TrainingClient:
    """Makes and finds jobs in one namespace of a cluster, with the rights of the user's kubeconfig.

    With `local=True` the cluster is the embedded one of this machine, which is started if none runs; `close`
    stops it then, unless `keep` is set. Use as `with`, or call `close`.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        context: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        local: bool = False,
        keep: bool = False,
        progress: bool = True,
    ) -> None:
        """Connect to the cluster.

        Args:
            namespace: of the jobs; None: the context's.
            context: of the kubeconfig; None: its current one.
            kubeconfig: path; None: as kubectl.
            local: the embedded cluster of this machine (Linux, extra [local]), not that of a kubeconfig.
            keep: with `local`, leave a cluster running that was started here.
            progress: say how an embedded cluster starts.

        Raises:
            ClientError: the arguments exclude each other.
            ClusterRefused: there is no cluster, or it cannot be started.
        """
        if local and (context or kubeconfig):
            raise ClientError("local=True brings its own cluster: leave out context= and kubeconfig=")
        if keep and not local:
            raise ClientError("keep=True goes with local=True")
        self._session: Session = open_session(
            kubeconfig=None if kubeconfig is None else os.fspath(kubeconfig),
            context=context,
            namespace=namespace,
            local=local,
            keep=keep,
            progress=progress,
        )

    @property
    def namespace(self) -> str:
        """The namespace of the jobs."""
        return self._session.namespace

    def train(
        self,
        train: Callable[..., object] | str | os.PathLike[str],
        workers: Workers = 1,
        *,
        arguments: Arguments | None = None,
        name: str | None = None,
        image: str | None = None,
        packages: Sequence[str] = (),
        code: str | os.PathLike[str] | None = None,
        resources: Mapping[str, Any] | None = None,
        strategy: str | Mapping[str, Any] | None = None,
        standby: int | None = None,
        template: str = "",
        env: Mapping[str, str] | None = None,
        pod: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> TrainingJob:
        """Start a job that runs a function or a script on each worker.

        A function travels as source, with the helpers, constants and imports that it uses; nothing is
        pickled.

        Args:
            train: the function, or the path of a script.
            workers: how many; or (the fewest with which it goes on, how many are wanted).
            arguments: keywords of the function, plain values; for a script flags by name, or a list of words.
            name: of the job; None: the function's name and six digits.
            image: of the workers; it has Python, torch and springtide. None: the template's, or the project's
                own.
            packages: requirements as pip takes them; each worker installs those that its image lacks.
            code: folder that travels too, and is the working directory.
            resources: of each worker, such as {"cpu": 4, "nvidia.com/gpu": 1}: request and limit; or a
                dictionary of `requests` and `limits`.
            strategy: AllReduce, ParameterServer or Hybrid; or the fields of `spec.strategy`. None: the
                template's, or AllReduce.
            standby: so many more pods stand by, outside of the group, and one takes the place of a worker
                that is lost. None: as many as the template says, or none.
            template: NAME of a ClusterTrainingTemplate, or TrainingTemplate/NAME for one of the namespace:
                what is not said here comes from it.
            env: environment variables.
            pod: fields of the pod template's spec, merged into what the client makes.
            spec: fields of the job's spec, merged likewise.

        Returns:
            The job, which goes on without this process.

        Raises:
            SourceError: the function, script or arguments cannot be sent, or an option is none.
            ClusterRefused: the API server refuses the job.
        """
        payload = pack(train, arguments, packages, code)
        suffix = secrets.token_hex(4)
        chosen = name or job_name(payload.name, suffix)
        options = JobOptions(
            workers=workers,
            image=image,
            resources=resources or {},
            strategy=strategy,
            standby=standby,
            template=template,
            env=env or {},
            pod=pod or {},
            spec=spec or {},
        )
        config = f"{chosen}-code-{suffix}"
        job = training_job(chosen, config, options)
        made = self._create(job, config_map(config, chosen, payload))
        return TrainingJob(self._session, made)

    def get(self, name: str) -> TrainingJob:
        """Return the job of a name, also one that was made by other means.

        Raises:
            JobNotFound: there is none.
            ClusterRefused: it may not be read.
        """
        return TrainingJob(self._session, self._session.request("GET", self._session.path(name)))

    def list(self) -> list[TrainingJob]:
        """Return all jobs of the namespace, by name. Raise ClusterRefused."""
        found = self._session.request("GET", self._session.path())["items"]
        return [
            TrainingJob(self._session, job) for job in sorted(found, key=lambda job: job["metadata"]["name"])
        ]

    def close(self) -> None:
        """Close the connection; jobs go on. An embedded cluster that was started here is stopped."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create(self, job: Object, config: Object) -> Object:
        """Create both objects or none, and let the ConfigMap go with the job."""
        session = self._session
        maps = f"/api/v1/namespaces/{session.namespace}/configmaps"
        name = config["metadata"]["name"]
        session.request("POST", maps, config)
        try:
            made = session.request("POST", session.path(), job, fieldValidation="Strict")
        except ClusterRefused as error:
            # Without an answer the job may have been made all the same, and would wait for its code for ever.
            if _is_final(error):
                with contextlib.suppress(ClusterRefused):
                    session.request("DELETE", f"{maps}/{name}")
            raise _explained(error, job["metadata"]["name"]) from error
        session.request("PATCH", f"{maps}/{name}", owned_by(made), MERGE_PATCH)
        return made


def _is_final(error: ClusterRefused) -> bool:
    """Return whether the server has decided: a request without an answer may have been carried out."""
    return 400 <= error.code < 500


def _explained(error: ClusterRefused, name: str) -> ClusterRefused:
    """Return the error of a job that was refused, with what to do where that is known."""
    text = f"job {name} was refused: {error}"
    if not _is_final(error):
        text = f"nobody knows whether job {name} was made: {error}; client.get({name!r}) finds it if it was"
    if error.code == 404:
        text = (
            f"the API server knows no {names.KIND} in {names.API_VERSION}: Springtide is not installed in"
            " this cluster; install its CRD and operator, or use TrainingClient(local=True)"
        )
    elif error.reason == "AlreadyExists":
        text = (
            f"there is a job {name} already: choose another name, or delete it by"
            f" client.get({name!r}).delete()"
        )
    return ClusterRefused(text, error.code, error.reason)
