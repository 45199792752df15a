"""Optimizer state in shards: each at two workers, none at all of them.

`shard_map` says who holds what, `collectives` moves gradients and values in a step, `pieces` is the
optimizer's view of what this worker holds, `migration` moves shards between generations, `snapshot` is their
part of a checkpoint, and `backend` is what the trainer talks to.
"""
