"""Checkpoints for other programs: `embodied-ppo export`.

Belongs here: writing and checking deployment bundles of robot policies (``bundle``), the program
that runs them (``run_policy``), published layouts of language and vision-language-action models
(``export``).

Does not belong here: policies that act in this package (``evaluation.trained_policy``).

To add a format: write it in a module of its own, and call it in ``export.export``.
"""
