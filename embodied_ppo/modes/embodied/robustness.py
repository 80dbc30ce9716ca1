"""Robustness of a robot policy: which properties its simulator can change, and their measurement.

The values, definitions and the display are in ``evaluation/robustness``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from embodied_ppo.config import loader
from embodied_ppo.config.schema import EnvConfig, EvaluateConfig
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import ConfigError, EnvError, Policy, ProgressCallback, VectorEnv
from embodied_ppo.evaluation import robustness
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.evaluation.robustness import ENGINE, PROPERTIES, Factor
from embodied_ppo.modes.embodied import components

Factory: TypeAlias = functools.partial[VectorEnv]
"""``components.make_env`` with all arguments except the seeds."""

SLOW_TO_CREATE = ("torch", "mjlab", "libero")
"""Simulators that are not created to find out what they accept: they take long, or start once."""


@dataclass(frozen=True)
class Sweep:
    """What will be measured.

    Attributes:
        factors: Properties and their values.
        left_out: Name of a factor or simulator -> why it is not measured.
        episodes: Episodes at each value.
        factory: Creates the nominal environment.
    """

    factors: tuple[Factor, ...]
    left_out: Mapping[str, str]
    episodes: int
    factory: Factory

    @property
    def lines(self) -> list[str]:
        """Return lines that state the size of the sweep and what is left out."""
        settings = robustness.settings_to_measure(self.factors)
        names = ", ".join(f.name for f in self.factors)
        return [
            f"robustness: {settings} settings of {names} x {self.episodes} episodes ="
            f" {settings * self.episodes} episodes, after those of the evaluation",
            *(f"robustness: {name} is left out: {why}" for name, why in self.left_out.items()),
        ]

    def measure(
        self,
        options: EvaluateConfig,
        policy: components.AnyPolicy,
        result: EvaluationResult,
        make_untrained: Callable[[], components.AnyPolicy],
        advance: ProgressCallback,
    ) -> dict[str, Any]:
        """Return the content of robustness.json.

        Args:
            options: Options of the evaluation.
            policy: The policy.
            result: Its evaluation in the nominal environment.
            make_untrained: Returns the policy before the training; called for a task that reports
                no success.
            advance: Progress callback.
        """
        options = replace(options, episodes=self.episodes)
        nominal = replace(result, episodes=result.episodes[: self.episodes])
        needs_floor = nominal.successes is None
        total = (robustness.settings_to_measure(self.factors) + needs_floor) * self.episodes
        finished = itertools.count(1)

        def evaluate(changes: Mapping[str, Any], policy: Policy = policy) -> EvaluationResult:
            return components.measure(
                options,
                policy,  # pyright: ignore[reportArgumentType]
                changed(self.factory, changes),
                lambda _: advance("robustness", next(finished), total),
            )

        advance("robustness", 0, total)
        untrained = evaluate({}, make_untrained()) if needs_floor else None
        return robustness.card(
            self.factors,
            robustness.measure(self.factors, nominal, evaluate),
            nominal=nominal,
            untrained=untrained,
            left_out=self.left_out,
        )


def changed(factory: Factory, changes: Mapping[str, Any]) -> Factory:
    """Return the factory of an environment with changed options.

    Args:
        factory: Factory of the nominal environment.
        changes: Options of section env, dotted paths below env.

    Raises:
        ConfigError: A value is out of bounds.
    """
    if not changes:
        return factory
    env = factory.keywords["config"]
    options = {**loader.dump(env), **changes}
    arguments: dict[str, Any] = {
        "config": loader.load(EnvConfig, options, source="robustness_values")
    }
    if changes.get("simulator") == "warp":
        arguments["device"] = torch.device("cuda", torch.cuda.current_device())
    if changes.get("id", env.id) != env.id:
        arguments["task"] = None
    return functools.partial(factory, **arguments)


def plan(
    options: EvaluateConfig, trained: EnvConfig, factory: Factory, nominal: VectorEnv
) -> Sweep:
    """Return what an evaluation with ``robustness=true`` measures beyond the nominal environment.

    Args:
        options: Options of the evaluation.
        trained: Environment of the training.
        factory: Creates the nominal environment.
        nominal: One such environment; it may be closed.

    Raises:
        ConfigError: A factor that is named cannot be changed, or there is none; more episodes per
            value than evaluated ones.
    """
    episodes = options.robustness_episodes
    if episodes is not None and episodes > options.episodes:
        raise ConfigError(
            f"robustness_episodes = {episodes}: at most episodes = {options.episodes}, whose first"
            " ones are those of the nominal environment; raise episodes"
        )
    planner = _Planner(options, trained, factory, nominal)
    named = {*options.robustness_factors, *options.robustness_values}
    factors: list[Factor] = []
    left_out: dict[str, str] = {}
    for name in options.robustness_factors or (*PROPERTIES, ENGINE):
        try:
            found, reasons = planner.engines() if name == ENGINE else (planner.factor(name), {})
        except EnvError as error:
            if name in named:
                raise ConfigError(f"robustness_factors = {name}: {error}") from error
            left_out[name] = str(error)
            continue
        factors.append(found)
        left_out |= reasons
    if not factors:
        raise ConfigError(
            f"robustness = true: env.id={planner.env.id} allows no change; leave it out"
        )
    default = min(robustness.DEFAULT_EPISODES, options.episodes)
    return Sweep(tuple(factors), left_out, episodes or default, factory)


class _Planner:
    """Finds the values of each factor and tries whether the simulator accepts them."""

    def __init__(
        self, options: EvaluateConfig, trained: EnvConfig, factory: Factory, nominal: VectorEnv
    ) -> None:
        self.options, self.trained = options, trained
        self.factory, self.nominal = factory, nominal
        self.env: EnvConfig = factory.keywords["config"]
        device = factory.keywords["device"]
        self.engine_module = components.engines()
        self.simulator: str = self.engine_module.simulator_of(
            self.env.id, self.env.simulator, device
        )
        self.is_own = self.simulator in self.engine_module.OWN

    def factor(self, name: str) -> Factor:
        """Return a factor other than engine.

        Raises:
            EnvError: The simulator cannot change it.
            ConfigError: A value of robustness_values is out of bounds.
        """
        if not self.is_own and (PROPERTIES[name].kind == "range" or name == "push_velocity"):
            own = self.engine_module.same_task(self.env.id, self.simulator).get("mujoco")
            cure = f"; write env.id={own} env.simulator=mujoco" if own else ""
            raise EnvError(
                f"only tasks of this package can change it, env.id={self.env.id} runs in"
                f" {self.simulator}{cure}"
            )
        ranges = self.engine_module.task_ranges(self.env.id, self.env.kwargs)
        factor = robustness.factor(
            name,
            self.env,
            self.trained,
            values=self.options.robustness_values.get(name),
            task_ranges=ranges,
            neutral=self.engine_module.neutral_ranges(list(ranges)),
            below=self.nominal.max_episode_steps or math.inf,
        )
        changes = [s.changes for s in factor.settings if s.changes]
        for change in changes:
            changed(self.factory, change)  # the types and bounds of options
        if changes and self.simulator not in SLOW_TO_CREATE:
            self._try(changes[-1])
        return factor

    def engines(self) -> tuple[Factor, dict[str, str]]:
        """Return the factor engine, and why other simulators are left out.

        Raises:
            EnvError: No other simulator runs the task here.
        """
        engines: dict[str, Mapping[str, Any]] = {}
        left_out: dict[str, str] = {}
        for name, id in self.engine_module.same_task(self.env.id, self.simulator).items():
            if name == "warp" and not torch.cuda.is_available():
                left_out[name] = "there is no GPU, and on a CPU it compiles for minutes"
                continue
            changes: dict[str, Any] = {"id": id, "simulator": name}
            if name not in ("warp", self.simulator):
                changes["kwargs"] = _without_capacities(self.env.kwargs)
            try:
                self._try(changes)
            except EnvError as error:
                left_out[name] = str(error)
                continue
            engines[name] = changes
        if not engines:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise EnvError(
                f"no other simulator here runs env.id={self.env.id}{reasons and f' ({reasons})'}"
            )
        return robustness.engine_factor(self.simulator, engines), left_out

    def _try(self, changes: Mapping[str, Any]) -> None:
        """Create one changed environment and close it.

        Raises:
            EnvError: The simulator refuses the changes, or has other observations or actions.
        """
        if self.simulator == "warp" and changes.get("simulator") is None:
            # The same task on the CPU refuses the same options and compiles nothing.
            kwargs = _without_capacities(self.env.kwargs)
            changes = {**changes, "simulator": "mujoco", "kwargs": kwargs}
        if changes.get("simulator") == "warp":
            return
        env = changed(self.factory, changes)(env_seeds(0, 0, 1))
        try:
            specs = (
                ("observations", env.obs_spec, self.nominal.obs_spec),
                (
                    "actions",
                    env.action_spec,
                    self.nominal.action_spec,
                ),
            )
            for kind, spec, expected in specs:
                if spec != expected:
                    raise EnvError(f"its {kind} differ from those of {self.simulator}")
        finally:
            env.close()


def _without_capacities(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a task without those that only warp reads."""
    return {k: v for k, v in kwargs.items() if k not in ("nconmax", "njmax")}
