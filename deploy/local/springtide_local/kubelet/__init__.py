"""The kubelet: runs the pods that are bound to a node as local processes and tells the API server how they
are.

A container lacks some things here, because a process of this machine has no namespaces of its own and no root
is asked for:

* *Mounts.* Paths are rewritten where they are handed over as text (`paths`); a path that a program builds
by itself is the machine's. * *Limits.* `resources.limits` are said and scheduled by, not enforced; a
container that uses too much is stopped by nobody but the kernel. * *A user of its own.* `securityContext`
changes nothing: all processes run as whoever started the cluster. * *DNS.* Services are reached by their
address, or by the variables that announce them. * *PID 1.* SIGTERM goes to the container's main process
only, as on a cluster; but a shell that is PID 1 ignores it there and dies here. * *A network of its own.*
All ports of the machine are seen. `SPRINGTIDE_BIND` is the address to listen on; listening on all addresses
works too, as long as no other pod takes the same port.
"""
