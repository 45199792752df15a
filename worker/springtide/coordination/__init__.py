"""Hold the worker's side of the conversation with the coordinator, and what it reports."""
