"""Language models: prompts, actor, critic, graders, decode engine, evaluation.

Belongs here: the construction of these parts from options, in one process (``components``) and in the processes of a
placement (``workers``), their timing (``profile``) and the prediction of a placement's speed (``cost_model``).

Does not belong here: the parts themselves.
"""
