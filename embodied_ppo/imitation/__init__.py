"""Supervised training before and beside PPO.

Belongs here: behaviour cloning of robot policies, supervised fine-tuning of language models,
recording of experts.

Does not belong here: readers and writers of data files (``data``).
"""
