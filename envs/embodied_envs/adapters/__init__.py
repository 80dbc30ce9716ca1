"""Simulators of other packages behind ``embodied_ppo.core.types.VectorEnv``.

Belongs here: one module for each simulator family, and what they share (the base class, spaces,
actions, action chunks).

Does not belong here: our own physics (``physics``) and tasks (``tasks``).

To add a simulator: write a module with ``has_task(id)`` and a subclass of ``base.Adapter``, call it
in ``embodied_envs._make_env``, and run ``embodied_envs.check_env`` on it in a test.
"""
