"""Trained policies of other libraries as policies of ours.

Belongs here: one reader for each library (``sb3``, ``rsl_rl`` and so on), which returns an
``imported.ImportedPolicy``; the reader of their files, which executes no code
(``untrusted_files``); networks of linear layers in a state_dict (``layers``); the options and
weights of ours that they become (``imported``), and the run with them (``imported_run``).

Does not belong here: how a run directory is written.

To add a library: write a module with ``read(path, normalizer)``, and add it to
``libraries.LIBRARIES``.
"""
