"""Checkpoints: the committed state on storage, written by all members beside training, restored when nobody
is left who holds it.

names, shares, manifest, schedule and keep decide and are pure; files and storage read and write; writer is
the thread beside training, saver what the runtime talks to, restore the way back.
"""
