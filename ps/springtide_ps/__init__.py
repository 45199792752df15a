"""Parameter servers: shards of parameters on servers, with the optimizers that update them.

`store` and `optim` decide what a request does to the numbers and know no sockets; `frames` is the wire's
form; `server` and `client` move bytes. Nothing here imports the worker library.
"""
