"""A prepared DataLoader: the library's batches in a training loop, all samples in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from springtide.data.batch import Batch
from springtide.integrations.dataloader import TrainingData
from springtide.integrations.together import the_runtime
from springtide.train_step.randomness import isolated


class ElasticLoader:
    """Stand in for a script's DataLoader.

    Its length is that of the loader in one of the reference processes, by which scripts count their steps.
    """

    def __init__(
        self, loader: DataLoader[Any], length: int | None, begin: Callable[[Any], Iterator[Any]]
    ) -> None:
        """Make it.

        Args:
            loader: of the script.
            length: batches of an epoch; None: nobody knows, for its samples are a stream.
            begin: begins a loop over this one.
        """
        self.loader, self._length, self._begin = loader, length, begin

    def __len__(self) -> int:
        """Return the batches of an epoch. Raise TypeError for a stream that does not say how many it has."""
        if self._length is None:
            raise TypeError(
                "len() of a prepared DataLoader over a stream, which does not say how many samples it has: "
                "count by accelerator.completed_steps, and give ElasticAccelerator(max_train_steps=...)"
            )
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Begin a loop: of training, if a prepared model is in training mode."""
        return self._begin(self)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the library shuffles each epoch.

        Args:
            epoch: unused.
        """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class TrainingSteps:
    """Iterate over the micro-batches of the batches that are dealt to this worker."""

    def __init__(
        self,
        batches: Iterator[Batch],
        data: TrainingData,
        seed: int,
        place: Callable[[Any], Any],
        begin_batch: Callable[[], int],
        leave: Callable[[BaseException], bool],
    ) -> None:
        """Begin before the first batch.

        Args:
            batches: of the library.
            data: of the loop.
            seed: of the loop.
            place: brings samples to the device.
            begin_batch: is told of each batch; returns the number of the last committed step.
            leave: leaves the open step for an error; returns whether that is swallowed.
        """
        self._batches, self._data, self._seed = batches, data, seed
        self._place, self._begin_batch, self._leave = place, begin_batch, leave
        self._pieces: Iterator[Batch] | None = None
        self._batch: Batch | None = None
        self.any_dealt = False
        """A batch was dealt whose step the job commits."""
        self.is_waiting = False
        """The micro-batch was given out, and no block has been opened for it."""

    def __iter__(self) -> Iterator[Any]:
        return self

    @property
    def is_last(self) -> bool:
        """Return whether the micro-batch is the last one of its step."""
        return self._batch is not None and self._batch.micro.is_last

    def leave_batch(self) -> None:
        """Go on with the next batch: the step of this one is committed or dropped."""
        self._pieces = None

    def finish(self) -> bool:
        """Return whether the loop ends where it stands, as it does when all workers have left it."""
        return next(self._batches, None) is None

    def __next__(self) -> Any:
        """Return the samples of the next micro-batch, on the device."""
        while True:
            if self._pieces is not None:
                try:
                    if (micro := next(self._pieces, None)) is not None:
                        self.is_waiting = True
                        return self._place(micro.data)
                except BaseException as error:
                    if not self._leave(error):
                        raise
                self._pieces = None
            self._batch = next(self._batches)
            self.any_dealt |= not the_runtime().steps.is_past
            self.is_waiting = True
            self._pieces = self._batch.split()
            step, micro = self._begin_batch(), next(self._pieces)
            with isolated(self._seed, step, int(micro.ids[0]) + 1 if micro.samples else 0):
                return self._place(micro.data)
