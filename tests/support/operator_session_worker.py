"""Workers that speak the coordinator's protocol and train nothing: commits that are only said, and a hang.

The first worker says ten commits a second, and in its log who is in a generation that commits. With HANG it
gets no further than step 20, which it says again and again, until the pod `...-worker-1-1` is there. When the
file that HANG names says so, the pod `...-worker-1-0` says that it is fetching samples for step 21, and the
others of its generation wait for it. With MEMORY it says what memory its model takes: MiB of parameters, of
gradients, of the optimizer's state, which is in shards, and of its limit.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

CODE = r"""
import json, os, queue, sys, time, uuid
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.session_client import SessionClient
from springtide_protocol.tls import read_authority
env = os.environ
pod = env["SPRINGTIDE_POD_NAME"]
me = pb.Member(id=uuid.uuid4().hex, pod_uid=env["SPRINGTIDE_POD_UID"], pod_name=pod,
               address=env["SPRINGTIDE_POD_IP"], slot=int(env["SPRINGTIDE_SLOT"]))
hello = pb.Hello(protocol_version=1, member=me, standing=pb.STARTING)
heard = queue.SimpleQueue()
client = SessionClient(env["SPRINGTIDE_COORDINATOR"], env["SPRINGTIDE_TOKEN"], lambda: hello, heard.put,
                       authority=read_authority(env))
client.start()
def send(**message):
    client.send(pb.WorkerMessage(**message))
def park(reason):
    hello.standing = pb.PARKED
    promise = pb.Parked(reason=reason, layout_hash="pretended")
    if hello.HasField("generation"):
        promise.generation.CopyFrom(hello.generation)
        promise.state.CopyFrom(hello.state)
    send(parked=promise)
def hangs():
    pods = [member.pod_name for member in hello.members]
    if "HANG" not in env or not any(name.endswith("-worker-1-0") for name in pods):
        return False
    try:
        with open(env["HANG"]) as file:
            return file.read() == "yes"
    except OSError:  # it is being replaced
        return False
def capped():
    return "HANG" in env and not any(member.pod_name.endswith("-worker-1-1") for member in hello.members)
said = None
while True:
    try:
        message = heard.get(timeout=0.1)
    except queue.Empty:
        message = pb.CoordinatorMessage()
    kind = message.WhichOneof("message")
    if kind == "welcome" and "MEMORY" in env:
        sizes = [int(word) << 20 for word in env["MEMORY"].split()]
        send(memory=pb.Memory(parameter_bytes=sizes[0], gradient_bytes=sizes[1], state_bytes=sizes[2],
                              limit_bytes=sizes[3], shard="Optimizer"))
    stuck = pod.endswith("-worker-1-0") and hello.standing == pb.ACTIVE and hangs()
    if kind == "welcome" and hello.standing != pb.ACTIVE:
        park(pb.STANDBY)
    elif kind == "start":
        hello.standing = pb.ACTIVE
        hello.generation.CopyFrom(message.start.generation)
        hello.state.CopyFrom(message.start.state)
        del hello.members[:]
        hello.members.extend(message.start.members)
        del hello.servers[:]
        hello.servers.extend(message.start.servers)
        send(formed=pb.Formed(generation=hello.generation))
    elif kind == "prepare" and hello.standing == pb.ACTIVE and not stuck:
        park(pb.DROPPED)
    elif kind == "boundary" and hello.standing == pb.ACTIVE and not stuck:
        park(pb.BOUNDARY)
    elif kind == "leave":
        with open(env["SPRINGTIDE_TERMINATION_LOG"], "w") as file:
            json.dump({"outcome": "Left", "reason": message.leave.reason}, file)
        client.close()
        sys.exit(0)
    if kind is not None or hello.standing != pb.ACTIVE:
        continue
    if stuck:
        activity = pb.Activity(step=21, doing=pb.DOING_FETCHING, seconds=1, where="train.py:31 in load")
        send(activity=activity)
    elif hangs() and (hello.members[0].id != me.id or hello.state.step >= 20):
        send(activity=pb.Activity(step=21, doing=pb.DOING_REDUCING, seconds=1))
    elif hello.members[0].id == me.id:
        if said != hello.generation.number:
            said = hello.generation.number
            print("commits with", *sorted(member.pod_name for member in hello.members), flush=True)
        hello.state.generation.CopyFrom(hello.generation)
        if hello.state.step < 20 or not capped():
            hello.state.step += 1
        commit = pb.Commit(state=hello.state, unix_time=time.time(), step_seconds=0.1, samples=8)
        send(progress=pb.Progress(commits=[commit]))
"""


def container() -> Object:
    """Fields of the worker container that runs it."""
    return {"command": ["python", "-c", CODE], "env": []}


def with_memory(*mebibytes: int) -> Object:
    """Fields of the container of a worker that tells of its memory: parameters, gradients, state, limit."""
    said = {"name": "MEMORY", "value": " ".join(map(str, mebibytes))}
    return container() | {"env": [said]}


def hanging() -> dict[str, Object]:
    """Keywords of a job in which it hangs when the ConfigMap `hang` says so."""
    volume = {"name": "hang", "configMap": {"name": "hang"}}
    env = [{"name": "HANG", "value": "/hang/now"}]
    mounts = [{"name": "hang", "mountPath": "/hang"}]
    return {"pod": {"volumes": [volume]}, "container": container() | {"env": env, "volumeMounts": mounts}}


def whether(hang: str) -> Object:
    """Return the ConfigMap that says whether the worker hangs."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hang"}, "data": {"now": hang}}
