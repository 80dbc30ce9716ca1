"""Teacher and simulators of ``embodied-ppo distill``.

The simulators return the observations of the teacher's actor and of the student's networks, each of
them once; ``GuidedPolicy`` divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embodied_ppo.config.schema import Config, EnvConfig
from embodied_ppo.core import compile
from embodied_ppo.core.errors import EnvError, show
from embodied_ppo.core.history import PREVIOUS_ACTIONS, SINGLE
from embodied_ppo.core.observation_names import names_observation
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import ArraySpec, ConfigError, ObsSpec, VectorEnv
from embodied_ppo.imitation.distillation import (
    ARRAY_NAME,
    DistillationLearner,
    GuidedPolicy,
    Selection,
    executed_bounds,
)
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.backbone import select_specs
from embodied_ppo.modes.base import RunRequest, TrainedRun
from embodied_ppo.modes.embodied import components
from embodied_ppo.placement.remote_envs import EnvDescription, describe_env

STARTED_ONCE = ("torch", "mjlab", "libero")
"""Simulators that may start only once in a process, so that no other is started to read spaces."""


@dataclass(frozen=True)
class _Reader:
    """What a policy reads of the simulators' observations.

    Attributes:
        names: Names of observations; None: all.
        is_array: Whether the policy reads one array, which has ARRAY_NAME in a dictionary.
    """

    names: tuple[str, ...] | None
    is_array: bool = False

    @staticmethod
    def of(spec: ObsSpec) -> _Reader:
        """Return the reader of all that ``spec`` describes."""
        is_array = isinstance(spec, ArraySpec)
        return _Reader((ARRAY_NAME,) if is_array else tuple(spec), is_array)

    def part(self, spec: ObsSpec, option: str) -> ObsSpec:
        """Return what this policy reads of ``spec``; ``option``: where the names are from."""
        if isinstance(spec, ArraySpec) or self.names is None:
            return spec
        named = select_specs(spec, self.names, option)
        return named[ARRAY_NAME] if self.is_array else named


@dataclass(frozen=True)
class Distillation:
    """A teacher and the simulators for it and its student; see ``prepare``.

    Attributes:
        teacher: Run and checkpoint of the teacher.
        env: Options of the simulators.
        probe: Spaces of the teacher's own simulators; None: not known.
        student: What the student reads.
        reads: What the teacher reads.
    """

    teacher: TrainedRun
    env: EnvConfig
    probe: EnvDescription | None
    student: _Reader
    reads: _Reader

    def make_env(self, request: RunRequest, seeds: list[int]) -> VectorEnv:
        """Return one environment per seed, for teacher and student.

        Raises:
            EnvError: The task refuses its options, or does not fit the teacher.
        """
        if request.task is not None:
            request.task.activate(request.notice)
        try:
            model = request.config.model
            env = components.make_env(seeds, config=self.env, device=request.device, model=model)
        except EnvError as error:
            own = components.training_env(request.config)
            if self.reads.names is None or own == self.env:
                raise
            _probe(request, own)  # raises if the student's options alone are refused
            raise EnvError(
                f"{_name(self.teacher)}: reads {', '.join(self.reads.names)}, which the student's"
                f" simulators do not offer ({error}); write the teacher's env.kwargs"
            ) from error
        try:
            self._check_spaces(env)
        except ConfigError:
            env.close()
            raise
        return env

    def _check_spaces(self, env: VectorEnv) -> None:
        """Raise ConfigError where the teacher was trained in other spaces."""
        if self.probe is None:
            return
        own, name = self.probe, _name(self.teacher)
        if own.action_spec != env.action_spec:
            raise ConfigError(
                f"{name}: its actions are {own.action_spec}, those of the student's task"
                f" {env.action_spec}; name a teacher of the same task and robot"
            )
        rates = [getattr(x, "step_s", None) for x in (own, env)]
        if rates[0] != rates[1]:
            raise ConfigError(
                f"{name}: decides every {rates[0]:g} s, the student every {rates[1]:g} s; write the"
                " teacher's env.kwargs, or train a teacher with the student's control rate"
            )
        spec, expected = self.reads.part(_raw_spec(env), "teacher"), own.obs_spec
        others = _named(expected)
        for key, x in _named(spec).items():
            if x != others[key]:
                raise ConfigError(
                    f"{name}: reads {key} of shape {others[key].shape}, the student's simulators"
                    f" return {x.shape}; write the env.kwargs and env.image_size that the teacher"
                    " was trained with"
                )

    def student_env(self, env: VectorEnv) -> EnvDescription:
        """Return the spaces that the student is built for."""
        return _described(env, self._student_spec(env))

    def _student_spec(self, env: VectorEnv) -> ObsSpec:
        """Return what the student's networks read, with its history."""
        spec = self.student.part(env.obs_spec, "model.actor_obs")
        actions = _named(env.obs_spec).get(PREVIOUS_ACTIONS)
        return spec if actions is None else {**_named(spec), PREVIOUS_ACTIONS: actions}

    def guided_policy(
        self, request: RunRequest, env: VectorEnv, student: components.AnyPolicy
    ) -> GuidedPolicy:
        """Load the teacher; return the policy of the rollouts.

        Raises:
            CheckpointError, ConfigError: The teacher cannot be loaded.
        """
        spec = self.reads.part(_raw_spec(env), "teacher")
        model = components.trained_model(self.teacher, allow=False)
        teacher = components.make_policy(
            replace(self.teacher.config, model=model), _described(env, spec)
        )
        assert isinstance(teacher, ActorCritic) and isinstance(student, ActorCritic)  # checked
        self.teacher.load_weights(teacher)
        return GuidedPolicy(
            student,
            teacher.eval(),
            request.config.distillation,
            read_student=Selection(self._student_spec(env)),
            read_teacher=Selection(spec, getattr(env, "history", None)),
            bounds=executed_bounds(request.config.env.action_mapping, env.action_spec),
        )


def prepare(request: RunRequest) -> Distillation | None:
    """Return the teacher and the simulators of a distillation; None: the run trains by PPO.

    Raises:
        ConfigError: The teacher does not fit the student.
        EnvError: A task refuses its options.
    """
    teacher, config = request.teacher, request.config
    if teacher is None:
        return None
    trained_with = teacher.source.manifest.get("task_hash")
    if request.task is not None and trained_with not in (None, request.task.hash):
        request.notice(
            f"{_name(teacher)}: files of {config.env.id} have changed since its training"
        )
    own, others = components.training_env(config), components.evaluation_env(teacher.config)
    probe = None
    student, reads = _Reader(own.obs_keys), _Reader(others.obs_keys)
    if config.env.simulator not in STARTED_ONCE:
        try:
            probe = _probe(request, others)
        except EnvError as error:
            raise EnvError(
                f"{_name(teacher)}: its simulators cannot be created ({error}); name a teacher that"
                " was trained with this version of the task"
            ) from error
        reads = _Reader.of(probe.obs_spec)
        if own.obs_keys is None:
            student = _Reader.of(_probe(request, own).obs_spec)
    keys = None
    if not ((student.is_array and reads.is_array) or None in (student.names, reads.names)):
        assert student.names is not None and reads.names is not None
        keys = tuple(dict.fromkeys((*student.names, *reads.names)))
    if keys is not None and student.is_array and config.model.history > 1:
        raise ConfigError(
            f"model.history = {config.model.history}: a student with a history names what it reads,"
            f" as the teacher reads other observations; write model.actor_obs=[{ARRAY_NAME}]"
            f" model.critic_obs=[{ARRAY_NAME}]"
        )
    realism = own.realism
    if realism.obs_keys is None and keys is not None:  # what only the teacher reads stays exact
        realism = replace(realism, obs_keys=config.model.actor_obs or student.names)
    cameras = tuple(dict.fromkeys((*own.cameras, *others.cameras)))
    env = replace(own, obs_keys=keys, cameras=cameras, realism=realism)
    return Distillation(teacher, env, probe, student, reads)


def make_learner(
    request: RunRequest, policy: GuidedPolicy, schedule: compile.CompileSchedule
) -> DistillationLearner:
    """Return the learner of a student; ``schedule``: when minibatches run as compiled code."""
    return DistillationLearner(
        policy,
        request.config,
        updates=request.updates,
        compile_schedule=schedule,
        dump_dir=request.run_dir,
    )


# ------------------------------------------------------------------------------------------- checks
def _name(teacher: TrainedRun) -> str:
    """Return the option and the run, for messages."""
    return f"teacher={teacher.run_dir}"


def check_teacher(teacher: TrainedRun, config: Config) -> None:
    """Compare the options of teacher and student, before anything is built.

    Raises:
        ConfigError: They are of different tasks, the teacher is no actor-critic without memory, or
            the student reads what makes the teacher privileged.
    """
    name, model, env = _name(teacher), teacher.config.model, teacher.config.env
    if teacher.config.mode != "embodied":
        raise ConfigError(f"{name}: is a language model; name the run of a robot policy")
    if model.policy != "actor_critic":
        raise ConfigError(
            f"{name}: has model.policy={model.policy}; a teacher must be model.policy=actor_critic"
        )
    if model.history > 1 or model.recurrent is not None:
        raise ConfigError(
            f"{name}: has a memory (model.history or model.recurrent), which a teacher cannot have;"
            " name a teacher that reads privileged observations instead"
        )
    for option, theirs, ours in (
        ("id", env.id, config.env.id),
        ("action_chunk", env.action_chunk, config.env.action_chunk),
        ("action_mapping", env.action_mapping, config.env.action_mapping),
    ):
        if theirs != ours:
            raise ConfigError(
                f"env.{option} = {show(ours)}: the teacher {teacher.run_dir} was trained with"
                f" {show(theirs)}; write env.{option}={show(theirs)}, or name another teacher"
            )
    _check_privileged(teacher, config)


def _check_privileged(teacher: TrainedRun, config: Config) -> None:
    """Refuse a student that reads what makes the teacher privileged. Raises ConfigError."""
    theirs = teacher.config.model.actor_obs or teacher.config.env.obs_keys or ()
    option = "env.obs_keys" if config.model.actor_obs is None else "model.actor_obs"
    ours = config.model.actor_obs or config.env.obs_keys or ()
    secret = [key for key in theirs if components.is_privileged(key)]
    shared = [key for key in ours if _overlaps(key, secret)]
    if not shared:
        return
    kept = ",".join(key for key in ours if key not in shared) or "NAME"
    raise ConfigError(
        f"{option} = [{','.join(ours)}]: contains {shared[0]}, which only a simulator knows and the"
        " teacher reads; the student could copy the teacher without learning to act without it;"
        f" write {option}=[{kept}]"
    )


def _named(spec: ObsSpec) -> dict[str, ArraySpec]:
    """Return observations as a dictionary; one array has the name ``SINGLE``."""
    return {SINGLE: spec} if isinstance(spec, ArraySpec) else dict(spec)


def _overlaps(key: str, others: Sequence[str]) -> bool:
    """Return whether ``key`` and one of ``others`` name a common observation."""
    return any(names_observation(key, x) or names_observation(x, key) for x in others)


def _probe(request: RunRequest, config: EnvConfig) -> EnvDescription:
    """Return the spaces of simulators with these options, from one that is created and closed."""
    if request.task is not None:
        request.task.activate(request.notice)
    env = components.make_env(env_seeds(0, 0, 1), config=config, device=request.device)
    try:
        return EnvDescription(describe_env(env), request.device)
    finally:
        env.close()


def _raw_spec(env: VectorEnv) -> ObsSpec:
    """Return the simulators' observations without the history of the student."""
    history = getattr(env, "history", None)
    return env.obs_spec if history is None else history.raw_spec


def _described(env: VectorEnv, spec: ObsSpec) -> EnvDescription:
    """Return the properties of simulators with ``spec`` as their observations."""
    description = EnvDescription(describe_env(env), env.device)
    description.obs_spec = spec
    return description
