"""Structured log lines: `key=value`, one line each; `extra={"fields": {"job": ...}}` adds fields."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback


class KeyValueFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and text.isascii() and all(c.isalnum() or c in "-_.:/@+" for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def is_announced_once(record: logging.LogRecord) -> bool:
    """False for kopf's line about each failed attempt: the operator says once that the server is away."""
    return not (record.name.startswith("kopf") and record.getMessage().startswith("Request attempt"))


def set_up() -> None:
    """Log to stderr; of kopf only what goes wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_announced_once)
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("kopf", "aiohttp.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def in_words(error: BaseException) -> str:
    """Return what an exception says and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"
