"""Media types of what is sent to the Kubernetes API."""

from __future__ import annotations

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # server-side apply; JSON is YAML, too
