"""The protocol between the processes of a job and its coordinator: messages, names, clients and limits.

Operator, worker and parameter servers import this package; it imports none of them.
"""
