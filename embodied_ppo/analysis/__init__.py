"""Comparison, re-execution, verification and search of runs.

Belongs here: what reads several runs, re-executes parts of one, or trains several to choose one:
comparison of runs (``compare``), branches (``fork``), the tensors of an update (``replay``), the
search for the first minibatch in which a metric left its range (``bisect``), the comparison of a
run with what it recorded (``verification``), the execution of updates again on which these are
built (``reexecution``), and the search for better options (``search``).

Does not belong here: training (``run``), the measurement of one checkpoint (``evaluation``), the
page of running trainings (``commands.watch``).

To add an analysis: write a module with a function that returns plain results, add a command
(``commands``) and a function of ``api``, which the command calls. It writes only into the directory
of its result, which the user can name (``out``, ``run_dir``). Exceptions are reports of
evaluations, which ``compare`` stores in the evaluated runs, and the certificate and the lock file,
which ``verify`` writes into the run.
"""
