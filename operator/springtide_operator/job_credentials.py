"""Tokens and certificates that processes of a job, and the operator, show each other: from one root key.

Nothing has to be read back to know it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from springtide_operator.api.job import Job, JobKey
from springtide_operator.certificate import job_authority, job_certificate


@dataclass(frozen=True)
class JobCredentials:
    """The newest key of one job.

    Attributes:
        root_key: the operator's.
        uid: of the job.
        turn: what the job's annotation says; another word makes another key.
    """

    root_key: bytes
    uid: str
    turn: str = ""

    @classmethod
    def of(cls, root_key: bytes, job: Job) -> JobCredentials:
        """Return the credentials of a job.

        Args:
            root_key: the operator's.
            job: with its uid and annotation.
        """
        return cls(root_key, job.uid, job.key_turn)

    @property
    def key(self) -> str:
        """Six hex digits by which the key is known: they tell nothing of it."""
        return self._derive("key")[:6]

    @property
    def token(self) -> str:
        """The job's token: HMAC-SHA256 (RFC 2104), hex."""
        return self._derive("job")

    @property
    def operator_token(self) -> str:
        """The operator's own token for the job: nobody else has it, no object holds it."""
        return self._derive("operator")

    @property
    def authority(self) -> str:
        """The certificate of the job's authority, in PEM."""
        return job_authority(self.root_key, self.uid, self.turn)

    def secret_data(self, key: JobKey, tls: bool, seconds: float) -> dict[str, str]:
        """Return what the job's Secret holds.

        Args:
            key: the newest, with the end of its certificate.
            tls: the job uses TLS.
            seconds: validity of the certificate.
        """
        data = {"token": self.token}
        if tls:
            ends = key.certificate_ends
            certificate, private = job_certificate(self.root_key, self.uid, ends, seconds, self.turn)
            data |= {"ca.crt": self.authority, "tls.crt": certificate, "tls.key": private}
        return data

    def _derive(self, purpose: str) -> str:
        text = f"springtide {purpose} {self.uid} {self.turn}"
        return hmac.new(self.root_key, text.encode(), hashlib.sha256).hexdigest()
