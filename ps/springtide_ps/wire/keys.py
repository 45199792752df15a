"""Keys of frames and chunks that have another name here than on the wire.

A server and a worker of neighbouring releases talk to each other, so a key keeps the spelling that it was
released with, whatever the thing is called since. New keys are called what the thing is called, and need no
line here.
"""

from __future__ import annotations

from typing import Final

RUN_ID_KEY: Final = "lineage"
"""Name of the run of training that the state is of (ENTER); content of another run is forgotten."""
KEEPS_APPLIED_BATCHES_KEY: Final = "books"
"""Whether chunks keep which batches were applied, since members do not step together (ENTER)."""
STEP_SPEC_KEY: Final = "recipe"
"""How a step is made, a `StepSpec`; on a connection that has told its options, with a number for them."""
BACKWARD_PASS_KEY: Final = "round"
"""Number of the backward pass in a step, from 0, where it is left out."""
SUBSTEPS_KEY: Final = "parts"
"""How many substeps of an open step values are wanted after."""
APPLIED_BATCHES_KEY: Final = "book"
"""The batches that were applied to a chunk or a slice, in what describes it."""
INTERVALS_KEY: Final = "ranges"
"""Numbers of batches, as intervals of them."""
BATCH_KEY: Final = "range"
"""Number of the batch that a member gets."""
KEEPALIVE_KEY: Final = "pulse"
"""Whether a side of the handshake knows signs of life."""
