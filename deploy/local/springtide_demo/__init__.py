"""The demo: real data trained through six disturbances on an embedded cluster, and what that cost.

`scenario`, `commits`, `gaps`, `survivors`, `report`, `svg`, `timeline` and `view` are pure: they decide and
compute from what they are given.
`steplog`, `reference`, `cluster`, `actions` and `story` touch files, processes and the Kubernetes API.
"""
