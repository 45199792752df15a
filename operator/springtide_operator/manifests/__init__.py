"""PURE: the Kubernetes objects of a job as plain dicts, ready to be sent."""
