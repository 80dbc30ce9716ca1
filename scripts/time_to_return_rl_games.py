"""Train rl_games' PPO and print greedy evaluations, for ``bench_time_to_return.py``.

    PYTHON scripts/time_to_return_rl_games.py FOLDER TASK SEED

FOLDER is a checkout of rl_games, whose configs for EnvPool are read
(rl_games/configs/mujoco/*_envpool.yaml; the task's version is replaced by that of TASK). PYTHON
needs torch, envpool, gymnasium and the other requirements of rl_games. Each line is [environment
steps, seconds of training, return].
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import envpool
import numpy as np
import torch
import yaml

EVERY, EPISODES = 20_480, 10


class Evaluate:
    """Observer of rl_games that evaluates the mean action; the time of evaluations does not count.

    The other functions of an observer do nothing.
    """

    def __init__(self, task: str) -> None:
        self.task, self.next, self.algo = task, EVERY, None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def after_init(self, algo: Any) -> None:
        self.algo = algo

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        if frame >= self.next:
            self.next = frame + EVERY
            line = [frame, round(total_time, 2), round(self._score(), 1)]
            print(line, file=sys.__stdout__, flush=True)

    def _score(self) -> float:
        """Return the mean return of one episode in each of ``EPISODES`` environments."""
        algo: Any = self.algo
        env: Any = envpool.make_gymnasium(self.task, num_envs=EPISODES, seed=10_000)
        obs, _ = env.reset()
        total, ended = np.zeros(EPISODES), np.zeros(EPISODES, dtype=bool)
        while not ended.all():
            observations = torch.as_tensor(np.asarray(obs), dtype=torch.float32)
            mean = algo.get_action_values({"obs": observations})["mus"]
            obs, reward, terminated, truncated, _ = env.step(algo.preprocess_actions(mean))
            total += np.where(ended, 0.0, reward)
            ended |= terminated | truncated
        env.close()
        return float(total.mean())


def main() -> None:
    folder, task, seed = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, str(folder))
    from rl_games.torch_runner import Runner  # pyright: ignore[reportMissingImports]

    name = task.partition("-")[0].lower()
    file = folder / "rl_games" / "configs" / "mujoco" / f"{name}_envpool.yaml"
    settings = yaml.safe_load(file.read_text())
    params = settings["params"]
    params["seed"] = seed
    params["config"]["env_config"] |= {"env_name": task, "seed": seed}
    params["config"]["device"] = params["config"]["device_name"] = "cpu"
    with (
        tempfile.TemporaryDirectory() as runs,
        contextlib.chdir(runs),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        runner = Runner(Evaluate(task))
        runner.load(settings)
        runner.run({"train": True, "play": False})


if __name__ == "__main__":
    main()
