"""Language models: prompts, actor, critic, graders, decode engine, evaluation.

Belongs here: the implementation of ``Mode`` (``mode``), the construction of the components from
options (``components``), the worker processes of a placement (``workers``), the estimate of their
memory (``memory``), the timing of the roles (``profile``) and the prediction of a placement's speed
(``cost_model``).

Does not belong here: the components themselves.
"""
