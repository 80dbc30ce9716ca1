"""A reward of your own for a language model: a function of the response and the true answer.

    embodied-ppo train experiment=arithmetic
    reward.grader=scripts/examples/own_reward.py:close_enough updates=5

The signature is verl's. Return a number, or a dictionary with "score" and further numbers. The
function is called in worker processes (``reward.workers``) with a time limit
(``reward.timeout_s``), so it may crash or hang without ending the run.
"""

from __future__ import annotations

from typing import Any


def close_enough(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Return 1 for the right number, less the farther away the answer is, and 0 for anything that
    is no number.
    """
    try:
        answer, truth = int(solution_str.strip()), int(ground_truth)
    except ValueError:
        return 0.0
    return 1.0 / (1.0 + abs(answer - truth))


if __name__ == "__main__":
    for response in ("42", "41", "forty-two"):
        print(response, close_enough("example", response, "42"))
