"""The certificates of a job, for tests of the processes that have them."""

from __future__ import annotations

import time
from typing import NamedTuple

from springtide_operator.certificate import job_authority, job_certificate

DAY = 86_400.0


class JobTls(NamedTuple):
    """The authority that clients trust, a certificate that servers show, and its private key, in PEM."""

    authority: str
    certificate: str
    key: str


def job_tls(
    uid: str, seconds: float = DAY, ends_in: float | None = None, root_key: bytes = b"r" * 32
) -> JobTls:
    """Return a job's certificates as the operator derives them.

    Args:
        uid: of the job.
        seconds: of the certificate's validity.
        ends_in: seconds until it ends; None: it is new.
        root_key: the operator's.
    """
    ends = int(time.time() + (seconds if ends_in is None else ends_in))
    certificate, key = job_certificate(root_key, uid, ends, seconds)
    return JobTls(job_authority(root_key, uid), certificate, key)
