"""Experience: acting in simulators, generating responses.

Belongs here: ``simulation.Rollout``, which runs a policy in a simulator, and ``language``, which
generates and grades. Both return a ``core.types.Trajectory``.

Does not belong here: learning from the experience (``algorithms``), simulators (``embodied_envs``).

To add a way to collect experience: implement ``training.system.Collector``, whose ``collect``
returns a ``core.types.Trajectory`` (``simulation.Staged`` is the shortest example), and construct
it in ``make_rollout`` of ``modes.embodied.components`` or ``modes.reasoning.components``.
"""
