"""What a server does to numbers: chunks, slices of embedding tables, optimizers. No sockets, and no clock."""
