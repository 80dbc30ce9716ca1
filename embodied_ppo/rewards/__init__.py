"""Rewards of language models: rule-based graders and reward models.

Belongs here: functions that score a response, the worker processes that call them, models that
score.

Does not belong here: rewards of robot tasks; a simulator returns those.

To use a grader of your own no file here changes: ``reward.grader=FILE.py:function``. To add a
built-in one, write the function in ``graders`` and list it in ``_BUILT_IN``.
"""
