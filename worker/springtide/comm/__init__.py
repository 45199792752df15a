"""What members of one generation send each other: the group, gradients, the side reduction, the state.

Nothing here knows the coordinator or the step's transaction: failures leave as exceptions of the collectives.
"""
