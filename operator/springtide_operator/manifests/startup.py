"""Startup probes that wait, instead of failing until there is something to probe.

The kubelet makes a Warning event of each probe that fails, whatever the thresholds and delays: one that asks
a port cannot be told when the process behind it will listen. The probe made here runs beside that process,
asks on its own until it gets an answer, and so fails only where something is wrong. There is no readiness
probe with it: kubelets go on asking that one while a pod ends, when nobody answers any more.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

# Of the probe's time, what is left for starting Python on a busy machine: it ends by itself, and says why.
MARGIN_SECONDS = 5

# It imports nothing of ours: a pod may run another version of Springtide than the operator that made it.
_CODE = """\
import os, socket, sys, time
port, path, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
until, seen = time.monotonic() + seconds, "nothing was tried"
while time.monotonic() < until:
    for host in os.environ.get("SPRINGTIDE_BIND") or "127.0.0.1", "::1":
        try:
            with socket.create_connection((host, port), 5) as link:
                link.sendall(f"GET {path} HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n".encode())
                answer = b"".join(iter(lambda: link.recv(65536), b""))
            if answer.split(b"\\r\\n", 1)[0].split(b" ")[1:2] == [b"200"]:
                sys.exit(0)
            seen = answer[:300].decode(errors="replace")
        except OSError as error:
            seen = seen if host == "::1" else str(error)
    time.sleep(0.05)
sys.exit(f"port {port} has not answered {path} within {seconds:g} s: {seen}")
"""


def startup_probe(port: int, path: str, seconds: int, failures: int = 1) -> Object:
    """Return a startup probe that succeeds when `GET path` is answered with 200.

    Args:
        port: of the container, on the loopback address (or on SPRINGTIDE_BIND).
        path: what is asked for.
        seconds: how long one probe waits; each that waits in vain is a Warning event.
        failures: after how many of them the container is restarted.
    """
    command = ["python", "-S", "-c", _CODE, str(port), path, str(seconds - MARGIN_SECONDS)]
    return {
        "exec": {"command": command},
        "timeoutSeconds": seconds,
        "periodSeconds": 1,
        "failureThreshold": failures,
    }


if __name__ == "__main__":  # for the operator's own pod, whose version is this one: PORT PATH SECONDS
    exec(_CODE)
