"""Simulators of other packages behind ``embodied_ppo.core.types.VectorEnv``.

Belongs here: one module for each simulator family, and what they share (spaces, actions, action chunks).

Does not belong here: our own physics (``physics``) and tasks (``tasks``).

To add a simulator: write a module with ``knows(id)`` and a class that implements ``VectorEnv``, call it in
``embodied_envs._made``, and run ``embodied_envs.check_env`` on it in a test.
"""
