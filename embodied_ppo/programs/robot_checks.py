"""Checks and lines of the log that need the simulators of a run, before its first update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from operator import attrgetter

import torch

from embodied_envs import task_files
from embodied_envs.base import images
from embodied_envs.base.errors import EnvError
from embodied_envs.types import Composite, Discrete, VectorEnv
from embodied_ppo.core.history import PREVIOUS_ACTIONS
from embodied_ppo.core.mirror import Mirror
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.robot_policy import AnyPolicy
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.programs.compilation import CompileSchedules
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout.environments import evaluation_env, make_env
from embodied_ppo.rollout.mirrored_task import derive_mirror
from embodied_ppo.training.progress import Messages


def check_evaluation(config: Config, device: torch.device) -> None:
    """Raise what the first evaluation would raise, before anything is written.

    Args:
        config: Options of the run.
        device: Device of the simulators.

    Raises:
        EnvError: The task refuses ``evaluation.env_kwargs``.
    """
    e = config.evaluation
    evaluation.evaluation_seeds(0, e.episodes)
    # Build one environment with the arguments of the evaluation, which the task may refuse.
    if e.env_kwargs and e.episodes:
        seeds = evaluation.evaluation_seeds(0, 1)
        probe = make_env(seeds, config=evaluation_env(config), device=device, model=config.model)
        with closing(probe):
            probe.reset()


def find_mirror(spec: RunSpec, policy: AnyPolicy, messages: Messages) -> Mirror | None:
    """Return the mirror image of the task for ``algorithm.symmetry``; None where it is null.

    It is derived from the task's class and model, which need no simulator in this process.

    Raises:
        EnvError: Left and right of the task differ, or it has none.
    """
    config = spec.config
    if config.algorithm.symmetry is None:
        return None
    assert isinstance(policy, ActorCritic)  # refused by validation
    if spec.task is not None:
        spec.task.activate(messages.notice)
    encoders = [x for x in (policy.encoder, policy.critic_encoder) if x is not None]
    names = {name for x in encoders for name in x.names} - {PREVIOUS_ACTIONS}
    env = config.env
    try:
        with task_files.working_folder():
            mirror = derive_mirror(
                str(env.id), env.kwargs, sorted(names), commands=env.commands, rewards=env.rewards
            )
    except EnvError as error:
        raise EnvError(f"write algorithm.symmetry=null: {error}") from error
    for line in (mirror.line, *mirror.warnings):
        messages.notice(line)
    return mirror


def _unread_options(config: Config, env: VectorEnv) -> Iterator[str]:
    """Yield lines about options without effect, and a horizon that cuts all episodes."""
    default, spec = Config(), env.action_spec
    specs = env.obs_spec.values() if isinstance(env.obs_spec, dict) else [env.obs_spec]
    discrete = isinstance(spec, Discrete) or (isinstance(spec, Composite) and not spec.box.size)
    continuous = ("env.action_mapping", "model.state_dependent_std", "model.init_log_std")
    unread: dict[str, str] = dict.fromkeys(
        continuous if discrete else (), f"the actions of {env.id} are discrete"
    )
    # Pooling follows an image encoder, which exists only for images.
    if all(spec.layout is None for spec in specs):
        unread["model.pooling"] = f"{env.id} returns no image"
    for path, reason in unread.items():
        value = attrgetter(path)(config)
        if value != attrgetter(path)(default):
            yield f"{path}={value}: not read, {reason}"
    # Where each rollout starts new episodes, no rollout contains steps beyond the horizon.
    horizon, limit = config.algorithm.horizon, env.max_episode_steps
    if config.env.restart_each_rollout and limit is not None and horizon < limit:
        yield (
            f"algorithm.horizon={horizon}: with env.restart_each_rollout=true only the first"
            f" {horizon} of up to {limit} steps of an episode are ever seen; set"
            f" algorithm.horizon={limit} to see all"
        )


def _image_lines(config: Config, env: VectorEnv) -> Iterator[str]:
    """Yield how each observation of two or more dimensions is read."""
    model, specs = config.model, env.obs_spec
    # Name the part of the model that reads images.
    network = "vision encoder"
    if model.policy == "actor_critic":
        network = model.network or "cnn"
    for name, spec in (specs if isinstance(specs, dict) else {"obs": specs}).items():
        # Above 8192 = 2^13, float32 has steps of 2^-10, about 0.001.
        if spec.dtype == torch.float64 and not model.normalize_obs:
            yield (
                f"write model.normalize_obs=true if numbers of observation {name} exceed 8192:"
                " float64 is cast to float32 before the policy reads it"
            )
        # Previous actions have two dimensions and are no image.
        if spec.layout is not None or (len(spec.shape) > 1 and name != PREVIOUS_ACTIONS):
            label = f"observation {name}"
            text = images.describe(spec.shape, spec.dtype, spec.layout, label, network)
            yield f"{text} (env.image_layout={config.env.image_layout or 'null'})"


def log_settings(
    config: Config,
    messages: Messages,
    env: VectorEnv,
    policy: AnyPolicy,
    schedules: CompileSchedules,
) -> None:
    """Add the lines of the log that precede the first update.

    Args:
        config: Options of the run.
        messages: Receives the lines.
        env: The simulators.
        policy: The policy.
        schedules: When minibatches and acting switch to compiled code.
    """
    for line in (*_unread_options(config, env), *_image_lines(config, env)):
        messages.notice(line)
    samples = config.algorithm.horizon * config.algorithm.rollout_epoch * env.num_envs
    if isinstance(policy, PI0):
        for line in filter(None, (policy.size_notice, policy.memory_notice(samples))):
            messages.notice(line)
    simulators = config.env.num_threads or "as many as there are cores"
    parts = {"minibatches": schedules.minibatches, "acting": schedules.acting()}
    first = {name: part.first_compiled_update for name, part in parts.items()}
    compiled = ", ".join(f"{k} from update {x + 1} on" for k, x in first.items() if x is not None)
    # ``schedule_at`` drops a switch after the end of this execution, without a reason.
    reason = schedules.reason or "training ends before it would be used"
    compiled = compiled or f"never ({reason})"
    threads = f"{torch.get_num_threads()} for tensors, {simulators} for simulators"
    messages.notice(f"threads: {threads}; compiled code: {compiled}")
