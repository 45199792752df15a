"""Send the state to a process that is about to join, while the others train.

A joiner *follows*: members send it parameters with the optimizer's state, each as it is between two steps,
and from then on each step's gradient of it, with which the joiner makes the optimizer's step itself. Nobody
waits for it, and nothing that it has counts: when it is a member, the state transfer compares all of it with
the others', and sends what differs. So an error in here costs time, and never a wrong state.
"""
