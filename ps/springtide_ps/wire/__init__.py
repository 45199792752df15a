"""Connections to a server, from a worker or another server: frames, streams, clients."""
