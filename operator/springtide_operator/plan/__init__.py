"""PURE decisions: `(job, observed children, the coordinator's word, now)` -> actions, new status, events.

One file per policy. Nothing in here reads a clock, opens a connection or imports
kopf, kubernetes, grpc, asyncio, os, time.
"""
