"""Communication of one generation's members: the group, gradients, the commit vote, the state transfer.

Nothing here knows the coordinator or the step's transaction: failures leave as exceptions of the collectives.
"""
