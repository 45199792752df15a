"""An S3 server for tests: moto's, in a process of its own from a folder of its own (`make tools`), since its
dependencies and the Kubernetes client's exclude each other.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from required import is_required

FOLDER = Path(__file__).parents[2] / ".tools" / "moto"
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextlib.contextmanager
def s3_server(*buckets: str) -> Iterator[dict[str, str]]:
    """Run it with these empty buckets; yield the environment that its clients need."""
    if not FOLDER.is_dir():
        if is_required("moto", os.environ):
            pytest.fail(
                f"{FOLDER} is missing, and SPRINGTIDE_REQUIRE names moto: run make tools", pytrace=False
            )
        pytest.skip(f"{FOLDER} is missing (make tools brings it)")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert port.isdigit(), "the S3 server did not start"
        endpoint = f"http://127.0.0.1:{port}"
        for bucket in buckets:
            request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT", data=b"")
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        process.stdout.close()
