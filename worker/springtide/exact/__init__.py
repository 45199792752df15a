"""Exact mode: the same bits at any number of workers.

The global batch is cut into logical parts that are fixed for the life of the job (`parts`), each with random
numbers and a start of its own. Gradients are added as block-scaled integers (`rounding`, `exponents`,
`buckets`), whose sum depends neither on order nor on grouping; buffers are combined in logical order
(`buffers`). This package knows no sockets: sums go through a callable.
"""
