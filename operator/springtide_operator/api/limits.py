"""Limits on what a user may write into a job, which the operator keeps whatever the API server let in."""

from __future__ import annotations

MAX_TEMPLATE_BYTES = 64 * 1024  # of a pod template as compact JSON
MAX_TEMPLATE_DEPTH = 64  # objects and lists within each other; a real pod has about 15
MAX_SNAPSHOT_BYTES = 160 * 1024  # of a training template as compact JSON: its jobs keep it in status
MAX_STATUS_BYTES = 512 * 1024  # 1,000 workers need 150 KiB
MAX_QUANTITY_LENGTH = 64
MAX_QUANTITY_EXPONENT = 30
MAX_NUMBER = 2**63 - 1  # the largest integer that the API server stores
