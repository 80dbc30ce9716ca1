"""Supervised training before and during PPO.

Belongs here: behaviour cloning of robot policies, supervised fine-tuning of language models,
recording of scripted experts.

Does not belong here: readers and writers of data files (``data``).
"""
