"""Robot policies: simulator, policy, rollout, learner, evaluation.

Belongs here: the construction of these parts from options, in one process (``components``) and in the processes of a
placement (``workers``), and their timing (``profile``).

Does not belong here: the parts themselves.
"""
