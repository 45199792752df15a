"""The numbers of a server and the operations on them: no sockets, and no clock."""
