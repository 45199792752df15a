"""Facts that the launcher reads of its machine, and how it splits and marks output: all by path or value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from springtide.comm.nccl import take_gpu
from springtide.coordination.outcome import Left, to_json
from springtide.errors import SpringtideError, UsageError
from springtide.launch import cgroup, cpus, devices
from springtide.launch.main import agreed
from springtide.launch.metrics_proxy import merged, read_port
from springtide.launch.options import parse
from springtide.launch.output import Lines
from springtide.launch.process_env import Folder, environment


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_out_of_memory_kills_of_both_versions_of_control_groups(tmp_path: Path) -> None:
    events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
    own = write(
        tmp_path / "own",
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
            "sys/fs/cgroup/kubepods/pod1/c1/memory.events": events,
            "sys/fs/cgroup/kubepods/memory.events": events.replace("kill 2", "kill 9"),
        },
    )
    assert cgroup.out_of_memory_kills(own) == 2
    # In a container the hierarchy begins at the container's group, and /proc tells the host's path or "/..".
    inside = write(
        tmp_path / "inside",
        {"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/memory.events": events},
    )
    assert cgroup.out_of_memory_kills(inside) == 2
    first = write(
        tmp_path / "first",
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        },
    )
    assert cgroup.out_of_memory_kills(first) == 4
    assert cgroup.out_of_memory_kills(write(tmp_path / "none", {"proc/self/cgroup": "garbage"})) is None
    assert cgroup.out_of_memory_kills(tmp_path / "nowhere") is None


def test_cpu_quota_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    second = write(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/pod/c\n",
            "sys/fs/cgroup/pod/c/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        },
    )
    assert cgroup.cpu_limit(second) == 2.5
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
    }
    assert cgroup.cpu_limit(write(tmp_path / "v1", files)) == 4.0
    files["sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us"] = "-1"
    assert cgroup.cpu_limit(write(tmp_path / "free", files)) is None
    assert (cpus.threads(16, None, 4), cpus.threads(16, 6.0, 4), cpus.threads(2, 0.5, 4)) == (4, 1, 1)


def test_processes_stay_on_the_numa_node_of_their_gpu(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8-9\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/devices/system/node/node2/cpulist": "\n",
            "sys/devices/system/node/nodelist": "0-2",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:86:00.0/numa_node": "0\n",
        },
    )
    for name in ("0000:3b:00.0", "0000:86:00.0"):
        (root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    nodes, gpus = cpus.read_nodes(root), cpus.read_gpu_nodes(root)
    first, second = frozenset({0, 1, 2, 3, 8, 9}), frozenset({4, 5, 6, 7})
    assert (nodes, gpus) == ({0: first, 1: second, 2: frozenset()}, [1, 0])
    everything = first | second
    assert cpus.pinning(2, everything, nodes, gpus) == [second, first]
    assert cpus.pinning(4, everything, nodes, gpus) == [first, first, second, second]
    assert cpus.pinning(3, everything, nodes, [-1, 0, 0]) == [first, first, second]
    assert cpus.pinning(2, everything - {0, 8}, nodes) == [first - {0, 8}, second]
    assert cpus.pinning(2, second, nodes) == [None, None]  # the container has one node's CPUs
    assert cpus.pinning(12, everything, nodes) == [None] * 12  # six on four CPUs
    assert cpus.read_nodes(tmp_path / "nowhere") == {}
    with pytest.raises(ValueError, match="invalid literal"):
        cpus.parse_cpu_list("0-x")


def test_gpus_are_counted_by_torch_only_where_a_driver_is(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError("there is no driver to ask for")

    assert devices.count(tmp_path, never) == 0
    write(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})
    assert devices.count(tmp_path, lambda: "a warning\ncount 4\n") == 4
    with pytest.raises(SpringtideError, match="give the number"):
        devices.count(tmp_path, lambda: "nonsense")


def test_output_is_cut_into_whole_lines() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == [b"one\n"]
    assert lines.feed(b"o\r 50%\r100%") == []
    assert lines.feed(b"\n\nthree") == [b"two\r 50%\r100%\n", b"\n"]
    assert lines.end() == [b"three\n"]
    assert lines.end() == []
    long = b"x" * 70000
    assert lines.feed(long) == [long + b"\n"]


def test_metrics_of_processes_become_one_exposition() -> None:
    text = (
        '# HELP steps_total Steps.\n# TYPE steps_total counter\nsteps_total{training_job="a"} 3.0\n'
        '# HELP wait Wait.\n# TYPE wait histogram\nwait_bucket{le="1.0"} 1.0\nwait_bucket{le="+Inf"} 2.0\n'
        "wait_count 2.0\nwait_sum 4.5\n"
    )
    both = merged({0: text, 1: text.replace("3.0", "5.0"), 2: "}{ no metrics"})
    assert both.count("# TYPE steps_total counter") == 1
    assert 'steps_total{local_rank="0",training_job="a"} 3.0' in both
    assert 'steps_total{local_rank="1",training_job="a"} 5.0' in both
    assert 'wait_bucket{le="+Inf",local_rank="1"} 2.0' in both
    assert 'local_rank="2"' not in both
    assert merged({}) == ""


def test_arguments_of_the_launcher() -> None:
    options = parse(["--processes", "auto", "--restarts=0", "--", "python", "x.py", "--restarts", "7"], {})
    assert (options.processes, options.restarts) == (0, 0)
    assert options.command == ("python", "x.py", "--restarts", "7")
    assert parse(["train"], {"SPRINGTIDE_PROCESSES": "3"}).processes == 3
    for arguments, says in [
        (["--processes", "0", "--", "x"], "from 1 to 64, got '0'"),
        (["--processes", "2"], "no command"),
        (["--restarts", "-1", "--", "x"], "whole number from 0, got '-1'"),
        (["train.py", "--", "x"], "'train.py' is no option"),
        (["--grace", "soon", "--", "x"], "must be seconds from 0, got 'soon'"),
        (["--process", "2", "--", "x"], "unrecognized arguments: --process"),
    ]:
        with pytest.raises(UsageError, match=says):
            parse(arguments, {})


def test_the_job_and_the_command_agree_on_the_number() -> None:
    job = {"SPRINGTIDE_COORDINATOR": "10.0.0.1:7070"}
    assert agreed(2, {}) == agreed(2, job | {"SPRINGTIDE_PROCESSES": "2"}) == 2
    assert agreed(1, job) == 1
    with pytest.raises(UsageError, match=r"would run 1 processes, and the job's .* is 2"):
        agreed(1, job | {"SPRINGTIDE_PROCESSES": "2"})
    with pytest.raises(UsageError, match=r"would run 8 processes, and the job's .* is 1"):
        agreed(8, job)


def test_each_process_has_its_own_files_and_numbers() -> None:
    folder = Folder(2)
    try:
        place = folder.rank_files[1]
        found = environment({"A": "b", "SPRINGTIDE_STEP_LOG": "/s"}, 1, 2, folder, 3)
        assert (found["A"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("b", "1", "2")
        assert (found["OMP_NUM_THREADS"], found["SPRINGTIDE_STEP_LOG"]) == ("3", "/s.1")
        assert environment({"OMP_NUM_THREADS": "9"}, 0, 2, folder, 3)["OMP_NUM_THREADS"] == "9"
        assert "OMP_NUM_THREADS" not in environment({}, 0, 1, folder, None)
        assert (place.outcome(), read_port(place.port)) == (None, None)
        Path(found["SPRINGTIDE_TERMINATION_LOG"]).write_bytes(to_json(Left("asked")))
        Path(found["SPRINGTIDE_METRICS_FILE"]).write_text("8123")
        assert (place.outcome(), read_port(place.port)) == (Left("asked"), 8123)
        place.clear()
        assert (place.outcome(), read_port(place.port)) == (None, None)
    finally:
        folder.close()
    assert not os.path.exists(place.folder)


def test_each_process_of_a_pod_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_gpu(0, 1)
    assert taken == []  # a single one keeps what the script chooses
    take_gpu(0, 2)
    take_gpu(1, 2)
    assert taken == [0, 1]
    with pytest.raises(SpringtideError, match="process 2 of 3 in this pod has no GPU, since there are 2"):
        take_gpu(2, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    take_gpu(2, 3)
    assert taken == [0, 1]


def test_memory_limit_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    machine = "MemTotal:       4000 kB\nMemFree:        10 kB\nSwapTotal:      96 kB\n"
    second = write(
        tmp_path / "second",
        {
            "proc/meminfo": machine,
            "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
            "sys/fs/cgroup/kubepods/pod1/c1/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": "3000000\n",
            "sys/fs/cgroup/kubepods/memory.max": "3500000\n",
        },
    )
    assert cgroup.memory_limit(second) == 3_000_000
    first = write(
        tmp_path / "first",
        {
            "proc/meminfo": machine,
            "proc/self/cgroup": "4:memory:/docker/a\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cgroup.memory_limit(first) == 4096 * 1024
    assert cgroup.memory_limit(tmp_path / "nowhere") is None
