"""Names of checkpoints, which are those of the states in them, and of their files."""

from __future__ import annotations

import re

from springtide_protocol.names import GenerationName, StateName

MANIFEST = "manifest.json"
FROZEN = "frozen"
"""The folder beside the checkpoints with what does not train; files in it are named by their contents."""
TABLES = "embedding tables"
"""Among the tracked objects of a tree: what tables hold."""
_FOLDER = re.compile(r"step-(\d{12,})-g(\d+)\.(\d+)\.(\d+)")


def folder(state: StateName) -> str:
    """step-STEP-gINCARNATION.RESTART.GENERATION: the folder of a checkpoint, below that of its job."""
    generation = state.generation
    return f"step-{state.step:012d}-g{generation.incarnation}.{generation.number}"


def parse(name: str) -> StateName | None:
    """The state that a folder's name tells; None for any other name."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, incarnation, restart, number = (int(group) for group in match.groups())
    state = StateName(GenerationName.of(incarnation, restart, number), step)
    return state if folder(state) == name else None


def share_file(attempt: str, index: int, count: int, kind: str = "workers") -> str:
    """Return the name of a share's file; another attempt at the same state writes other files.

    Args:
        attempt: what tells this attempt from others, as a part of the name.
        index: of the share, from 0.
        count: of the shares.
        kind: of the processes whose state it is.
    """
    return f"{kind}{attempt}-{index:05d}-of-{count:05d}.safetensors"


def frozen_file(sha256: str) -> str:
    """A block of parameters that do not train, by the hash of all its bytes."""
    return f"{sha256}.safetensors"


def receipt_file(share: str) -> str:
    """Written when a share's file is whole: its size and checksum."""
    return share.removesuffix(".safetensors") + ".json"


def header_file(attempt: str, kind: str = "workers") -> str:
    """Return the name of the file that describes the tree (`springtide.comm.codec`), without its tensors.

    Args:
        attempt: what tells this attempt from others, as a part of the name.
        kind: of the processes whose state it is.
    """
    return f"{kind}{attempt}.json"
