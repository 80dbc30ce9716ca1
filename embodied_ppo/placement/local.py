"""LocalSystem: simulator, rollout, policy and learner in this one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from embodied_ppo import checkpoint, evaluate
from embodied_ppo.config import EvaluationConfig
from embodied_ppo.log import numbers
from embodied_ppo.rollout import Rollout
from embodied_ppo.types import CheckpointError, Learner, Metrics, Policy, Trajectory, VectorEnv


class LocalSystem:
    """``types.System`` without copies: acting and learning share one set of weights."""

    def __init__(
        self,
        *,
        policy: Policy,
        rollout: Rollout,
        learner: Learner,
        make_evaluation_env: Callable[[list[int]], VectorEnv],
        evaluation: EvaluationConfig,
        checkpoints: Path,
        keep_last: int,
        config_text: str,
        info: Mapping[str, Any],
    ) -> None:
        """``config_text`` and ``info`` (versions, hash ..) go into every checkpoint."""
        assert isinstance(policy, nn.Module)
        self.policy, self.module, self.rollout, self.learner = policy, policy, rollout, learner
        self.make_evaluation_env, self.evaluation = make_evaluation_env, evaluation
        self.checkpoints, self.keep_last = checkpoints, keep_last
        self.config_text, self.info = config_text, info
        self.version = 0
        self.result: evaluate.EvaluationResult | None = None
        """The newest evaluation."""
        self.saved: Path | None = None
        """The newest checkpoint, after ``saved_update`` updates."""
        self.saved_update = -1

    def collect(self, horizon: int, *, update: int) -> tuple[Trajectory, Metrics]:
        return self.rollout.collect(horizon, update=update, version=self.version)

    def update(self, experience: Trajectory, *, update: int) -> Metrics:
        lag = self.version - experience.version.double().mean().item()
        return self.learner.update(experience, update=update) | {"rollout/version_lag": lag}

    def publish(self, version: int) -> None:
        self.version = version

    def evaluate(self, update: int) -> Metrics:
        e = self.evaluation
        self.result = evaluate.evaluate(
            self.policy,
            self.make_evaluation_env,
            episodes=e.episodes,
            num_envs=e.num_envs,
            seed=e.seed,
            deterministic=e.deterministic,
        )
        metrics = self.result.metrics()
        if self.saved is not None and self.saved_update == update:
            checkpoint.set_score(self.saved, numbers(metrics)["eval/return"])
        return metrics

    def save(self, update: int, *, env_steps: int) -> Path:
        self.saved = checkpoint.save(
            self.checkpoints,
            update=update,
            policy=self.module.state_dict(),
            training={"learner": self.learner.state(), "rollout": self.rollout.state()},
            config_text=self.config_text,
            info={**self.info, "env_steps": env_steps},
            keep_last=self.keep_last,
        )
        self.saved_update = update
        return self.saved

    def load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Continue where ``source`` was saved, bit for bit. Raises CheckpointError where it does not fit."""
        checkpoint.load_weights(self.module, source.policy(), source.path / checkpoint.POLICY)
        training = source.training()
        try:
            self.learner.load_state(training["learner"])
            self.rollout.load_state(training["rollout"], notice=notice)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{source.path / checkpoint.TRAINING}: does not fit this run ({str(error).splitlines()[0]}); "
                "resume with the options it was trained with"
            ) from error
        self.version = source.update
        self.saved, self.saved_update = source.path, source.update

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by phase: simulate, act, advantages, update."""
        return self.rollout.cpu_s | self.learner.cpu_s

    def close(self) -> None:
        self.rollout.close()
        self.learner.close()
