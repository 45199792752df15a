"""Structured log lines: `key=value`, one line each, with the job and the generation."""

from __future__ import annotations

import json
import logging
import sys
import time


class KeyValueFormatter(logging.Formatter):
    """Every record carries the job's fields; `extra={"fields": {...}}` adds more."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.fields = fields

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self.fields,
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={quoted(value)}" for key, value in fields.items())


def quoted(value: object) -> str:
    """A value on one line; in quotes where a reader could take it for several."""
    text = str(value)
    plain = text and text.isascii() and all(c.isalnum() or c in "-_.:/@+" for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def set_up(**fields: object) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(**fields))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
