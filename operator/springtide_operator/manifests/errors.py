"""Errors that keep a pod from being made, before the API server is asked."""

from __future__ import annotations


class TemplateError(Exception):
    """The template cannot be worked with: the message says where, what is wrong and what to do."""
