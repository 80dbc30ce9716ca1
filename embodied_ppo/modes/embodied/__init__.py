"""Robot policies: simulators, policy, rollout, learner, evaluation.

Belongs here: the implementation of ``Mode`` (``mode``), the construction of the components from
options (``components``), the worker processes of a placement (``workers``), the estimate of their
memory (``memory``), the timing of the roles (``profile``), the deployment bundle (``bundle``) and
the script that runs it elsewhere (``run_policy``).

Does not belong here: the components themselves.
"""
