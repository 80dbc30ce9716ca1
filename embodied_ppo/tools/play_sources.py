"""What ``embodied-ppo play`` shows: a run, a checkpoint, a report, or a task without a policy."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import CheckpointError, ConfigError, one_line
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import VectorEnv
from embodied_ppo.core.devices import select_device
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import report, robot_evaluation
from embodied_ppo.evaluation.checkpoint_evaluation import evaluated_config, options_of_report
from embodied_ppo.options.schema import Config, EvaluateConfig
from embodied_ppo.policies.robot_policy import sampling_temperature
from embodied_ppo.rollout.environments import make_env
from embodied_ppo.tools.player import Player
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.trained_run import TrainedRun, open_run


class Weights:
    """The weights of a run's newest checkpoint, which the policy follows.

    Attributes:
        source: The loaded checkpoint.
        run_dir: Directory of the run.
    """

    def __init__(self, run: TrainedRun, policy: Any, *, follow: bool) -> None:
        """Store what to follow; with ``follow`` False the checkpoint stays."""
        self._run, self._policy, self._follow = run, policy, follow
        self.run_dir = run.run_dir
        self.source = run.source

    def update(self) -> str:
        """Load the newest checkpoint if there is a newer one; return a line about it, or ""."""
        latest = self._run.run_dir / "checkpoints" / "latest"
        try:
            if not self._follow or os.readlink(latest) == self.source.path.name:
                return ""
            newest = checkpoint.open_checkpoint(self._run.run_dir)
            replace(self._run, source=newest).load_weights(self._policy)
        except OSError:  # the run was moved or deleted
            return ""
        except CheckpointError as error:
            return f"the newest checkpoint was not loaded: {error}"
        self.source = newest
        return f"loaded {newest.path.name}"


@contextmanager
def play_task(config: Config, agent: str, episode: int) -> Iterator[tuple[Player, None]]:
    """Yield a player without policy and weights, for the environment of a run's options.

    Raises:
        ConfigError, EnvError: The task cannot be shown.
    """
    with closing(_factory(config)(evaluation.evaluation_seeds(config.seed, 1))) as env:
        yield Player(env, seed=config.seed, episode=episode, agent=agent), None


@contextmanager
def play_run(
    options: EvaluateConfig, agent: str = "trained", episode: int = 0
) -> Iterator[tuple[Player, Weights]]:
    """Yield a player for the options of an evaluation, and the weights of its policy.

    Raises:
        CheckpointError, ConfigError, EnvError: The checkpoint or its task cannot be used.
    """
    run = open_run(options.checkpoint, say=Progress(quiet=False).say)
    if run.config.mode == "reasoning":
        raise ConfigError(f"play shows robots: {options.checkpoint} is a language model")
    select_device("cpu", options.threads, notice=run.say)
    config, allow = evaluated_config(run, options), options.allow_changed_task
    factory = _factory(config, robot_evaluation.evaluated_task(run, config.env, allow=allow))
    policy, _ = robot_evaluation.restore(run, config, factory, allow=allow)
    temperature = None
    if not options.deterministic:
        temperature = sampling_temperature(policy, options.temperature)
    seeds = evaluation.evaluation_seeds(options.seed, 1)
    with closing(factory(seeds)) as env, evaluation.evaluation_mode(policy, temperature):
        evaluation.set_instructions(policy, env.instructions)
        acting = {"seed": options.seed, "deterministic": options.deterministic}
        player = Player(env, policy, episode=episode, agent=agent, **acting)
        follows = Path(options.checkpoint).resolve() == run.run_dir.resolve()
        yield player, Weights(run, policy, follow=follows)


def read_report(folder: Path) -> tuple[EvaluateConfig, dict[str, Any]]:
    """Return the options of the evaluation in a report of a run, and its report.json.

    Raises:
        CheckpointError: The report cannot be read, or its evaluation not be repeated.
    """
    try:
        content = report.read(folder / "report.json")
        source = folder.resolve().parents[1] / "checkpoints" / str(content["checkpoint"])
        options = options_of_report(content, source)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        reason = one_line(error, kind=True)
        raise CheckpointError(f"{folder}: is no report of an evaluation ({reason})") from error
    if not source.is_dir():  # written with out=, or moved
        fact = f"{folder} is not in RUN/reports of the run that has {source.name}"
        raise CheckpointError(f"name the run, or move the report there: {fact}")
    return options, content


def _factory(config: Config, task: TaskFiles | None = None) -> Callable[[list[int]], VectorEnv]:
    """Return the function that creates one world of a run's task on the CPU.

    Raises:
        ConfigError: There are several tasks.
    """
    env = config.env
    if not isinstance(env.id, str):
        raise ConfigError(f"write env.id={env.ids[0]}: play shows one task, env.id has several")
    simulator = "mujoco" if env.simulator == "warp" else env.simulator
    return functools.partial(
        make_env,
        config=replace(env, simulator=simulator, num_threads=0),
        device=torch.device("cpu"),
        task=task,
        model=config.model,
        rebuild=False,
    )
