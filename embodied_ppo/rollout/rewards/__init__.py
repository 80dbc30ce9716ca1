"""Rewards of language models: rule-based graders and reward models.

Belongs here: functions that score a response, the worker processes that call them, models that
score.

Does not belong here: rewards of robot tasks; a simulator returns those.

To use a grader of your own no file here changes: ``reward.grader=FILE.py:function``. To add a
built-in one, write the function in ``graders``, list it in ``_BUILT_IN`` (the function's name is
the option's value), and name it in the docstring of ``reward.grader`` in ``options.schema``. A
built-in grader runs in the training process without a time limit; if it can hang or crash, exclude
it in ``graders.is_cheap``. The default of a data source is an entry of ``DEFAULTS``.
"""
