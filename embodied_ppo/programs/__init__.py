"""The training programs: they construct every object of a run and train.

Read ``robot`` (or ``language``) first: it constructs environments, policy, learner, rollout and
evaluation of one process in order. ``runs`` decides once what a run is (``run_spec``), opens its
directory, builds the processes of the plan with one of the two programs, and trains.

Belongs here: the construction of a run from its options, and its course from the first to the last
update.

Does not belong here: the objects themselves (policies, learners, rollouts, plans), and what works
on finished runs (``tools``).

To add a kind of training: write its program beside ``robot``, and select it in ``runs.build``.
"""
