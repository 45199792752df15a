"""Count the descriptors that a process group takes, before one is formed that this process has no room for.

gloo connects each member with each other one, and we keep a duplicate of each connection, by which a group
that is stuck can be ended. So they grow with the group, and a process that runs out of them while a group
forms fails in the middle of it, where it is hard to tell from a broken network.
"""

from __future__ import annotations

import errno
import os
import resource

PER_PEER = 2  # the connection, and our duplicate
PER_GROUP = 5  # gloo's listener, its epoll and a pipe; a duplicate that is looked at while a group forms
SPARE = 64  # for what is opened besides: files of the data, checkpoints, NCCL's connections


class TooFewDescriptorsError(OSError):
    """A group takes more descriptors than the process may have."""


def of_group(size: int) -> int:
    """Return how many descriptors a group of so many processes takes in each of them."""
    return PER_PEER * (size - 1) + PER_GROUP if size > 1 else 0


def largest_group(limit: int, opened: int) -> int:
    """Return how many processes the largest group has that there is room for.

    Args:
        limit: descriptors that this process may have.
        opened: those that it has.
    """
    return max(1, (limit - opened - SPARE - PER_GROUP) // PER_PEER + 1)


def check_room(size: int) -> None:
    """Raise TooFewDescriptorsError when a group of so many processes has no room in this one."""
    limit, opened = descriptor_limit(), open_descriptors()
    if opened + of_group(size) > limit:
        raise TooFewDescriptorsError(
            errno.EMFILE,
            f"a group of {size} processes takes {of_group(size)} descriptors of each, {opened} are open here,"
            f" and this process may open {limit} (RLIMIT_NOFILE, which is as high as it may be raised)",
        )


def room_for_group() -> int:
    """Return how many processes the largest group has that this process has room for, while it has none."""
    return largest_group(descriptor_limit(), open_descriptors())


def why_too_few(wanted: int) -> str:
    """Return what to do where a generation of all that the job wants has no room here; "" where it has.

    Args:
        wanted: processes; 0: not known.
    """
    limit, opened = descriptor_limit(), open_descriptors()
    largest = largest_group(limit, opened)
    if wanted <= largest:
        return ""
    return (
        f"this process may open {limit} files (its hard limit, RLIMIT_NOFILE), which is enough for"
        f" generations of {largest} processes, and the job wants {wanted}: raise the container runtime's"
        f" limit to {opened + SPARE + of_group(wanted)} at least, or let the job want fewer"
    )


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
