"""Teacher and simulators of ``embodied-ppo distill``.

The simulators return the observations of the teacher's actor and of the student's networks, each of
them once; ``GuidedPolicy`` divides them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from embodied_envs.adapters.spaces import is_privileged
from embodied_envs.base.errors import ConfigError, show
from embodied_envs.base.observation_names import names_observation
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import EnvInfo, ObsSpec, Say, VectorEnv
from embodied_ppo.core.history import PREVIOUS_ACTIONS
from embodied_ppo.imitation.distillation import GuidedPolicy, Selection, executed_bounds
from embodied_ppo.options.schema import Config, EnvConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.backbone import select_specs
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.training.trained_run import TrainedRun


@dataclass(frozen=True)
class Distillation:
    """A teacher and the simulators for it and its student; see ``prepare``.

    Attributes:
        config: Options of the student's run.
        device: Device of the simulators.
        task: Files of the user's task.
        teacher: Run and checkpoint of the teacher.
        env: Options of the simulators.
        student_keys: Names of the observations that the student reads; None: all.
        teacher_keys: Names of the observations that the teacher reads; None: all.
    """

    config: Config
    device: torch.device
    task: TaskFiles | None
    teacher: TrainedRun
    env: EnvConfig
    student_keys: tuple[str, ...] | None
    teacher_keys: tuple[str, ...] | None

    def make_env(self, seeds: list[int]) -> VectorEnv:
        """Return one environment per seed, for teacher and student.

        Raises:
            EnvError: The task refuses its options.
        """
        return environments.make_env(
            seeds, config=self.env, device=self.device, task=self.task, model=self.config.model
        )

    def student_env(self, env: VectorEnv) -> EnvInfo:
        """Return the spaces that the student is built for."""
        return replace(env.info, obs_spec=self._student_spec(env))

    def _student_spec(self, env: VectorEnv) -> ObsSpec:
        """Return what the student's networks read, with its history."""
        spec = env.obs_spec
        if self.student_keys is None:
            return spec
        assert isinstance(spec, dict)  # named observations
        names = select_specs(spec, self.student_keys, "model.actor_obs")
        return names | {k: v for k, v in spec.items() if k == PREVIOUS_ACTIONS}

    def guided_policy(self, env: VectorEnv, student: nn.Module) -> GuidedPolicy:
        """Load the teacher; return the policy of the rollouts.

        Raises:
            CheckpointError, ConfigError: The teacher cannot be loaded, or was trained in simulators
                with other spaces.
        """
        # The teacher reads the newest observations only, without the history of the student.
        history = env.history if isinstance(env, HistoryEnv) else None
        spec = env.obs_spec if history is None else history.raw_spec
        if self.teacher_keys is not None:
            spec = select_specs(spec, self.teacher_keys, f"teacher={self.teacher.run_dir}")
        config = replace(self.teacher.config, model=self.teacher.model(allow=False))
        teacher = robot_policy.make_policy(config, replace(env.info, obs_spec=spec))
        assert isinstance(teacher, ActorCritic) and isinstance(student, ActorCritic)  # checked
        self.teacher.load_weights(teacher)
        return GuidedPolicy(
            student,
            teacher.eval(),
            self.config.distillation,
            read_student=Selection(self._student_spec(env)),
            read_teacher=Selection(spec, history),
            bounds=executed_bounds(self.config.env.action_mapping, env.action_spec),
        )


def prepare(
    config: Config, teacher: TrainedRun, task: TaskFiles | None, device: torch.device, notice: Say
) -> Distillation:
    """Return the teacher and the simulators of a distillation.

    Args:
        config: Options of the student's run.
        teacher: Run and checkpoint of the teacher, see ``check_teacher``.
        task: Files of the user's task.
        device: Device of the simulators.
        notice: Called with lines for the log.
    """
    if task is not None and teacher.source.manifest.get("task_hash") not in (None, task.hash):
        notice(f"teacher={teacher.run_dir}: files of {config.env.id} have changed since")
    own, others = environments.training_env(config), environments.evaluation_env(teacher.config)
    keys, realism = None, own.realism
    if own.obs_keys is not None and others.obs_keys is not None:
        keys = tuple(dict.fromkeys((*own.obs_keys, *others.obs_keys)))
        # What only the teacher reads stays exact.
        realism = environments.limit_realism(realism, config.model.actor_obs or own.obs_keys)
    cameras = tuple(dict.fromkeys((*own.cameras, *others.cameras)))
    env = replace(own, obs_keys=keys, cameras=cameras, realism=realism)
    return Distillation(config, device, task, teacher, env, own.obs_keys, others.obs_keys)


def check_teacher(teacher: TrainedRun, config: Config) -> None:
    """Compare the options of teacher and student, before anything is built.

    Raises:
        ConfigError: They are of different tasks, the teacher is no actor-critic without memory, or
            the student reads what makes the teacher privileged.
    """
    name, model, env = f"teacher={teacher.run_dir}", teacher.config.model, teacher.config.env
    if teacher.config.mode != "embodied":
        raise ConfigError(f"{name}: is a language model; name the run of a robot policy")
    if model.policy != "actor_critic" or model.history > 1 or model.recurrent is not None:
        raise ConfigError(
            f"{name}: has model.policy={model.policy}, model.history={model.history},"
            f" model.recurrent={show(model.recurrent)}; name a teacher with"
            " model.policy=actor_critic and without a memory, which may read privileged"
            " observations instead"
        )
    for option in ("id", "action_chunk", "action_mapping"):
        theirs, ours = getattr(env, option), getattr(config.env, option)
        if theirs != ours:
            raise ConfigError(
                f"env.{option} = {show(ours)}: the teacher {teacher.run_dir} was trained with"
                f" {show(theirs)}; write env.{option}={show(theirs)}, or name another teacher"
            )
    theirs, ours = (options.tasks or options.ids for options in (env, config.env))
    if theirs != ours:
        raise ConfigError(
            f"write env.tasks={show(theirs)}: the teacher {teacher.run_dir} reads the index of a"
            f" task among these, and the student would read it among {show(ours)}"
        )
    # Where one of them names its observations, the other one must, too: both read one simulator.
    own = environments.training_env(config).obs_keys
    others = environments.evaluation_env(teacher.config).obs_keys
    if (own is None) != (others is None):
        raise ConfigError(
            f"write model.actor_obs=[..] and model.critic_obs=[..], because {name} reads"
            f" {show(others)}"
            if own is None
            else f"{name}: reads all observations, the student {show(own)}; write"
            " model.actor_obs=null, or name a teacher with model.actor_obs"
        )
    # A student that reads the teacher's secret could copy it without learning to act without it.
    theirs = teacher.config.model.actor_obs or env.obs_keys or ()
    secret = [key for key in theirs if is_privileged(key)]
    option = "env.obs_keys" if config.model.actor_obs is None else "model.actor_obs"
    for key in config.model.actor_obs or config.env.obs_keys or ():
        if any(names_observation(key, x) or names_observation(x, key) for x in secret):
            raise ConfigError(
                f"{option}: remove {key}, which only a simulator knows and the teacher reads; the"
                " student could copy the teacher without learning to act without it"
            )
