"""Exit codes of the command line."""

from __future__ import annotations

# ``doctor`` found a problem of the default recipes, or ``verify`` found a difference.
PROBLEM_FOUND = 1
REFUSED = 2  # the input was refused; nothing was started, except that ``RunRefused`` ends a run
FAILED = 3  # the run failed; the last line on stderr states the cause
INTERRUPTED = 130  # the user interrupted the run, which has been saved
