"""Container paths inside text become real ones; nothing that only looks like one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.kubelet.paths import PathMap

PATHS = PathMap(
    {
        "/springtide": Path("/real/root"),
        "/data": Path("/pods/1/data"),
        "/data/deep": Path("/pods/1/deep"),
        "/dev/termination-log": Path("/pods/1/message"),
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data", "/pods/1/data"),
        ("/data/", "/pods/1/data/"),
        ("/data/x/y.pt", "/pods/1/data/x/y.pt"),
        ("/data/deep/x", "/pods/1/deep/x"),
        ("/data/deeper", "/pods/1/data/deeper"),
        ("--dir=/data/x", "--dir=/pods/1/data/x"),
        ("/a:/data:/data/deep", "/a:/pods/1/data:/pods/1/deep"),
        ("/data,/springtide", "/pods/1/data,/real/root"),
        ("file:///data/ckpt", "file:///pods/1/data/ckpt"),
        ("cat /data/x > /dev/termination-log; exit 1", "cat /pods/1/data/x > /pods/1/message; exit 1"),
        ("echo x >/data/x", "echo x >/pods/1/data/x"),
        ('{"dir": "/data"}', '{"dir": "/pods/1/data"}'),
        ("['/data/a', '/springtide/b']", "['/pods/1/data/a', '/real/root/b']"),
        ("ls $(cat /data/list)", "ls $(cat /pods/1/data/list)"),
        ("/data/*", "/pods/1/data/*"),
    ],
)
def test_paths_on_a_boundary_are_rewritten(text: str, expected: str) -> None:
    assert PATHS.rewrite(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "/database",
        "/mydata",
        "https://host/data/x",
        "http://data/x",
        "s3://bucket/data",
        "x/data",
        "./data",
        "data",
        "",
        "/springtide2",
        "/dev/termination-logs",
        "profile:///data2",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert PATHS.rewrite(text) == text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data", "/pods/1/data"),
        ("/data/../data/x", "/pods/1/data/x"),
        ("/data/deep/x", "/pods/1/deep/x"),
        ("/database", "/database"),
        ("/springtide", "/real/root"),
        ("/", "/"),
    ],
)
def test_a_whole_path_is_resolved(path: str, expected: str) -> None:
    assert PATHS.resolve(path) == Path(expected)


def test_without_mounts_nothing_changes() -> None:
    assert PathMap({}).rewrite("/data /x") == "/data /x"


@given(st.text(alphabet="/data-x=:, \"'", max_size=40))
def test_rewriting_replaces_no_more_than_the_mount_paths(text: str) -> None:
    mounts = PathMap({"/data": Path("/REAL")})
    assert mounts.rewrite(text).replace("/REAL", "/data") == text
