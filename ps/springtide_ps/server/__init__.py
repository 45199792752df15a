"""The server: what it answers to requests, the two-phase commit of steps, and the shards that it holds."""
