"""The Python client: jobs from functions and scripts. Users import it as `springtide.client`.

`source`, `packing` and `manifest` decide what is sent; `boot` begins it in the pod; `session`, `client` and
`job` talk to the API server, with the parts of the command line; `screens` shows.
"""
