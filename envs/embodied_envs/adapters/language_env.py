"""Simulators of language-conditioned tasks of other projects as a ``VectorEnv``."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

from embodied_envs.adapters.base import AdapterOptions, factory_arguments
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.adapters.language_task import TASKS, make_tasks
from embodied_envs.adapters.torch_env import TorchVectorEnv
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base.errors import EnvError, check_names
from embodied_envs.base.observation_names import INSTRUCTION

# Values of env.simulator.
SIMULATORS = (*TASKS, "maniskill")


def make(id: str, simulator: str, options: AdapterOptions) -> GymnasiumEnv | TorchVectorEnv:
    """Create environments of a task, whose id is the project's name of it.

    Entries of ``kwargs``: sentences (what episodes may ask for; null: those that the adapter
    knows), processes (whether each environment has its own process), and options of the project.

    Raises:
        EnvError: The project's package is missing, or an option is invalid.
    """
    package = "mani_skill" if simulator == "maniskill" else TASKS[simulator].package
    spec = None
    with contextlib.suppress(ModuleNotFoundError):  # the package of a submodule is missing
        spec = importlib.util.find_spec(package)
    if spec is not None:
        return (ManiSkillEnv if simulator == "maniskill" else LanguageEnv)(id, simulator, options)
    hint = "start in the folder of RoboTwin" if simulator == "robotwin" else f"install {simulator}"
    raise EnvError(
        f"{hint}: env.id={id} needs its package {package}, which Python does not find here"
    )


def _take_sentences(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Remove ``sentences`` from kwargs and return them. Raises EnvError for other than texts."""
    given = kwargs.pop("sentences", None) or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(x, str) and x for x in given):
        raise EnvError(f"write a list of texts: env.kwargs.sentences={given!r}")
    return tuple(given)


class LanguageEnv(GymnasiumEnv):
    """Environments of a ``LanguageTask``, each in its own process."""

    def __init__(self, id: str, simulator: str, options: AdapterOptions) -> None:
        task_class, kwargs = TASKS[simulator], dict(options.kwargs or {})
        cameras = tuple(options.cameras) or task_class.cameras
        if simulator == "simpler":  # each of its two robots has one of the cameras
            cameras = cameras[1:] if id.startswith("widowx") else cameras[:1]
        check_names("env.cameras", cameras, task_class.cameras)
        with wrap_errors(f"env.id={id}: {simulator} fails: "):
            known, extra = task_class.prepare(id, kwargs)
        sentences = _take_sentences(kwargs) or tuple(known)
        if task_class.known_options is not None:
            check_names("env.kwargs", list(kwargs), (*task_class.known_options, "processes"))
        if not sentences:
            raise EnvError(f"write env.kwargs.sentences=[..]: env.id={id} draws one of several")
        state = ["state"] if task_class.state_size else []
        keys = state if options.obs_keys is None else options.obs_keys
        size = tuple(options.image_size)
        kwargs = {"kind": simulator, "task": id, "cameras": cameras, "image_size": size} | kwargs
        kwargs = {"sentences": sentences, **extra, **kwargs}
        options = replace(options, cameras=cameras, obs_keys=[*keys, *cameras], kwargs=kwargs)
        limit = task_class.time_limit(id)
        spec = EnvSpec(id, vector_entry_point=make_tasks, max_episode_steps=limit)
        super().__init__(id, options, spec=spec)
        # ``make_tasks`` returns Gymnasium's vector, which takes one seed per environment.
        self._has_own_vector, self.step_s = False, task_class.step_s(id)
        read = (lambda obs: obs[INSTRUCTION][:, 0]) if len(sentences) > 1 else None
        self._observe_sentences(sentences, read)


class ManiSkillEnv(TorchVectorEnv):
    """ManiSkill 3: all environments step together on one device.

    With cameras, "agent/qpos" and "sensor_data/CAMERA/rgb" are observed, else the task's state.
    The task has no sentence: it is that of ``kwargs.sentences`` or the words of the id. Success is
    ManiSkill's and ends an episode. Other ``kwargs`` are those of ``gymnasium.make``.
    """

    def __init__(self, id: str, simulator: str, options: AdapterOptions) -> None:
        kwargs = dict(options.kwargs or {})
        words = "".join(f" {x.lower()}" if x.isupper() else x for x in id.partition("-v")[0])
        sentences = _take_sentences(kwargs) or (words.strip(),)
        cameras, (height, width) = tuple(options.cameras), options.image_size
        kwargs = {"obs_mode": "rgb" if cameras else "state"} | kwargs
        if cameras:
            kwargs = {"sensor_configs": {"height": height, "width": width}} | kwargs
            state = ("agent/qpos",) if options.obs_keys is None else options.obs_keys
            images = (f"sensor_data/{name}/rgb" for name in cameras)
            options = replace(options, obs_keys=(*state, *images))
        make: Callable[..., Any] = _make_maniskill
        arguments = {**factory_arguments(options), "task": id, **kwargs}
        super().__init__(id, replace(options, kwargs=arguments), make=make)
        self.instructions = sentences[:1]


def _make_maniskill(*, task: str, num_envs: int, seed: int, device: str, **kwargs: Any) -> Any:
    """Create ManiSkill's environments; ``reset`` sets the seeds."""
    import gymnasium

    importlib.import_module("mani_skill.envs")
    wrappers = importlib.import_module("mani_skill.vector.wrappers.gymnasium")
    backend = "physx_cpu" if device == "cpu" else "physx_cuda"
    with wrap_errors(f"name a task and options of ManiSkill: env.id={task}: "):
        env = gymnasium.make(task, num_envs=num_envs, sim_backend=backend, **kwargs)
    return wrappers.ManiSkillVectorEnv(env)
