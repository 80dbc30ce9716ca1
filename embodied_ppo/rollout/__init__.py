"""Experience: acting in simulators, generating responses.

Belongs here: ``simulation.Rollout``, which runs a policy in a simulator, and ``language``, which
generates and grades. Both return a ``core.types.Trajectory``.

Does not belong here: learning from the experience (``algorithms``), simulators (``embodied_envs``).
"""
