"""Data sets: prompts, synthetic tasks, and demonstrations in LeRobot's layout.

Belongs here: readers and writers of files, and generators of examples.

Does not belong here: training on the data (``imitation``, ``ppo``).

To add a synthetic language task: add an entry to ``synthetic_tasks.TASKS`` and its name to
``DataConfig.task``.
"""
