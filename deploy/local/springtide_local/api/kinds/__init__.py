"""Peculiarities of each built-in kind: defaults, checks, allocations. One file per family, `registry` lists
them.
"""
