"""The position in the data that the next step starts from; a part of the committed state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from springtide.data.streams import StreamPosition

_NUMBERS: Final = ("stage", "epoch", "position", "step")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of the job in its data: it moves only with a commit and is rolled back with the parameters.

    stage: ordinal of the training loop (`batches` call) in the script, from 0. epoch: epochs completed in
    this stage, so also the number of the running one, from 0. position: samples of the running epoch that lie
    behind, in the order of its permutation. step: committed steps since the job began, over all stages.
    streams: positions in data that are read from streams of shards; None: there are none, or nobody has
    looked at this pass yet.
    """

    stage: int = 0
    epoch: int = 0
    position: int = 0
    step: int = 0
    streams: tuple[StreamPosition, ...] | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"cursor: {name} must be an integer >= 0, got {value!r}")

    def advance(self, batch_size: int, dataset_size: int) -> Cursor:
        """Return the cursor after the step that starts here; the last batch is short, neither padded nor
        dropped.

        Args:
            batch_size: samples of the global batch, at least 1.
            dataset_size: samples of one epoch.

        Raises:
            ValueError: the position lies outside of the data set, or `batch_size` is below 1.
        """
        if self.position >= dataset_size:
            raise ValueError(
                f"cursor: position {self.position} lies outside a dataset of {dataset_size} samples"
            )
        if batch_size < 1:
            raise ValueError(f"cursor: batch_size must be at least 1, got {batch_size}")
        position = self.position + batch_size
        if position >= dataset_size:
            return Cursor(self.stage, self.epoch + 1, 0, self.step + 1)
        return Cursor(self.stage, self.epoch, position, self.step + 1)

    def next_stage(self) -> Cursor:
        """The start of the next training loop; steps go on being counted."""
        return Cursor(self.stage + 1, 0, 0, self.step)

    def with_streams(self, streams: tuple[StreamPosition, ...]) -> Cursor:
        """Return the same cursor with other positions of streams."""
        return replace(self, streams=streams)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; positions of streams are in it where there are any."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        if self.streams is not None:
            found["streams"] = [position.to_json() for position in self.streams]
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cursor:
        """Raise ValueError when a field is missing, unknown or no integer >= 0."""
        streams = value.get("streams")
        names = set(value) - {"streams"}
        if names != set(_NUMBERS):
            raise ValueError(f"cursor: expected the fields {sorted(_NUMBERS)}, got {sorted(names)}")
        positions = None if streams is None else tuple(map(StreamPosition.from_json, streams))
        stage, epoch, position, step = (value[name] for name in _NUMBERS)
        return cls(stage, epoch, position, step, positions)
