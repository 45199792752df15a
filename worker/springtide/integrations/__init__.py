"""Adapters for training libraries that users have already; each needs its own extra."""
