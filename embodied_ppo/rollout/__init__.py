"""Experience: acting in simulators, generating responses.

Belongs here: ``simulation.Rollout``, which runs a policy in a simulator, and
``language_rollout``, which generates and grades. Both return a ``core.types.Trajectory``.
The mirror image of a simulated robot (``mirrored_task``).

Does not belong here: learning from the experience (``ppo``), simulators (``embodied_envs``).

To add a way to collect experience: implement ``training.run_system.Collector``, whose ``collect``
returns a ``core.types.Trajectory`` (``interleaved_rollouts`` is the shortest example), and
construct it in ``make_rollout`` of ``programs.robot`` or ``programs.language``.
"""
