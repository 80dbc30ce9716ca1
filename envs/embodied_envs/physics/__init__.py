"""Batched MuJoCo for our own tasks: CPU threads or MuJoCo Warp.

Belongs here: stepping, rendering, domain randomisation, and the ``VectorEnv`` on top of them.

Does not belong here: what a task rewards and observes (``tasks``).
"""
