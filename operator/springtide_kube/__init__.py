"""The one client of the Kubernetes API: of the operator, the `springtide` command, the demo and the tests.

Connections and requests are those of `kubernetes.aio`; this package adds what it lacks, and imports nothing
of the programs that use it.
"""
