"""`springtide launch`: the processes of one pod, or of one machine, under one parent.

It imports no torch, so that it starts at once and stays small. It must not train, and it must not decide who
is a member: that is the coordinator's part.
"""
