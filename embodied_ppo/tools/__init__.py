"""Tools around the trainer: they work on finished runs, predict runs, or prepare them.

Belongs here: what reads, compares, re-executes or repeats runs (``policy_comparison``,
``verification``, ``run_fork``, ``update_replay``, ``bisection``), fits recipes to devices
(``memory_fit``), shows runs (``watch_server``), checks the machine
(``machine_checks``), writes a task (``task_generator``), and reads other libraries' files
(``import_config``, ``import_policy``).

Does not belong here: anything that a training needs. What trains never imports this folder, and
without it ``embodied-ppo train`` and ``evaluate`` work (``tests/tools/test_removal.py``).

To add a tool: write a module with a public function that uses ``api`` and the files of runs, name
it in ``embodied_ppo.__init__``, and add a command (``commands``) that calls it and prints. A tool
writes only into the directory of its result, which the user can name (``out``, ``run_dir``).
Exceptions are reports of evaluations, which ``policy_comparison`` stores in the evaluated runs, and
the certificate and the lock file, which ``verification`` writes into the run.
"""
