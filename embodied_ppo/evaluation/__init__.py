"""Measure a policy: episodes in simulation, held-out prompts, reports, videos.

Belongs here: running evaluations, confidence intervals, report pages, video files.

Does not belong here: what an experiment measures of its own training (``training``).
"""
