"""Policies and critics: neural networks from observations or tokens to actions and values.

Belongs here: modules that implement ``core.types.Policy``, their parts, and readers of published
weights.

Does not belong here: losses, optimisers, simulators.

To add a policy: implement ``core.types.Policy`` (``actor_critic`` is the shortest example), add a
value to ``ModelConfig.policy`` in ``options.schema`` and construct it in
``policies.robot_policy.make_policy``.
"""
