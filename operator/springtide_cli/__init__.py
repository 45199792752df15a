"""The `springtide` command: what people type. It talks to the API server only, as kubectl does.

`manifest`, `jobview` and `story` are pure; `kube` is the port to Kubernetes; `screen` prints.
"""
