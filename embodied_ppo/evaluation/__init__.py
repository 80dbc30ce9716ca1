"""Measure a policy: episodes in simulation, held-out prompts, reports, videos.

Belongs here: running evaluations, confidence intervals, report pages, video files, the policy of a
checkpoint outside of training (``trained_policy``).

Does not belong here: what an experiment measures of its own training (``training``).

To add a metric of an evaluation: return it from ``EvaluationResult.metrics`` (episodes) or
``PromptEvaluationResult.metrics`` (prompts) under a tag ``eval/..``, and add a row with its unit
and healthy range to docs/metrics.md. To add a chart to the report page: add its tags to
``report.CURVES``.
"""
