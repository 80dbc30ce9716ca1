"""LIBERO's language-conditioned manipulation tasks (Liu et al. 2023) as a ``VectorEnv``.

Needs the extra ``libero``. A CPU core simulates about 10 steps per second; rendering takes nearly
all of the time. Every environment runs in its own process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gymnasium.envs.registration import EnvSpec
from torch import Tensor

from embodied_envs.adapters import libero_task
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.adapters.libero_task import CAMERAS, drawn_task, make_tasks, package_folder
from embodied_envs.adapters.simulator_processes import discard_output
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base.errors import EnvError
from embodied_envs.types import ArraySpec, Box, EnvInfo, Step

TIME_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300}
# Suite -> control steps (1/20 s) of an episode, as in OpenVLA (run_libero_eval.py) and openpi
# (examples/libero/main.py). The longest demonstrations have 193, 254, 270, 505 and 373 steps.
TIME_LIMITS |= {"libero_10": 520, "libero_90": 400}
# Stand-in for the sentences of a suite where LIBERO's package is missing.
SENTENCE = "pick up the black bowl between the plate and the ramekin and place it on the plate"
_ASSETS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects")
_ASSETS += ("textures", "turbosquid_objects")
_DOWNLOAD = "hf download lerobot/libero-assets --repo-type dataset --local-dir"


def has_task(id: str) -> bool:
    """Return whether the id is "libero/<suite>"."""
    return id.removeprefix("libero/") in TIME_LIMITS and id.startswith("libero/")


def describe(
    id: str,
    *,
    obs_keys: Sequence[str] | None,
    cameras: Sequence[str],
    image_size: tuple[int, int],
    action_chunk: int,
    max_episode_steps: int | None,
) -> EnvInfo:
    """Return the spaces of ``LiberoEnv`` without LIBERO's package.

    Its sentences are not known then. ``SENTENCE`` is as long as the longest of libero_spatial.

    Args:
        id: "libero/<suite>".
        obs_keys: Vector observations to return; None: all.
        cameras: See ``LiberoEnv``.
        image_size: (H, W) in pixels.
        action_chunk: Actions of a decision.
        max_episode_steps: Control steps of an episode; None: those of the suite.
    """
    limit = max_episode_steps or TIME_LIMITS[id.removeprefix("libero/")]
    images = {name: ArraySpec((3, *image_size), torch.uint8) for name in tuple(cameras) or CAMERAS}
    has_state = obs_keys is None or "state" in obs_keys
    return EnvInfo(
        id=id,
        obs_spec={**({"state": ArraySpec((8,))} if has_state else {}), **images},
        action_spec=Box((-1.0,) * 7 * action_chunk, (1.0,) * 7 * action_chunk),
        max_episode_steps=-(-limit // action_chunk),
        device=torch.device("cpu"),
        instructions=(SENTENCE,),
        gripper_closes=LiberoEnv.gripper_closes,
    )


class LiberoEnv(GymnasiumEnv):
    """``num_envs`` environments of a suite, for example "libero/libero_spatial".

    Each environment has one fixed task, or draws one for every episode.

    observation   "state" [8]: end effector position (m), orientation (axis times angle, rad), two
                  finger positions (m); camera name: uint8 [3, H, W]; with several tasks
                  "instruction" int64 [], the environment's index in ``instructions``
    action        [7] in [-1, 1]: change of position and orientation, gripper (1 closes)
    reward        1 when the task succeeds, which ends the episode and sets ``success``

    cameras       LIBERO's names; () means agentview and robot0_eye_in_hand
    image_size    (H, W)

    Entries of ``kwargs``:

    tasks         index or indices into the suite (None: all); of G groups of neighbours with equal
                  seeds, group g has tasks[g * len(tasks) // G]
    draw_tasks    True: an episode with a seed has tasks[seed // 50 mod len(tasks)], as RLinf draws
                  tasks for every episode; a change of the task builds its scene (5 to 20 s)
    settle_steps  steps without motion before an episode, while objects come to rest
    mirror        True: images as in the published demonstrations, on which checkpoints were
                  trained: robosuite's upside-down images turned by 180 degrees, so that left and
                  right are exchanged. False: upright and not mirrored.
    assets        folder of the downloaded meshes; None: LIBERO's default, then
                  ~/.cache/libero/assets
    processes     whether each environment has its own process; None: if there are several

    The first episode after seeding starts in initial state number seed mod 50, the following ones
    in states drawn at random: 50 consecutive seeds cover the benchmark's 50. ``task_names`` and
    ``instructions`` have one entry per selected task; ``task`` int64 [N] and ``Step.task`` are each
    environment's index into them.
    """

    # The last action that closes the gripper; its negative opens it.
    gripper_closes = 1.0

    def __init__(self, id: str, options: AdapterOptions) -> None:
        if not has_task(id):
            suites = ", ".join(f"libero/{suite}" for suite in TIME_LIMITS)
            raise EnvError(f"env.id={id} is not a suite of LIBERO; choose one of {suites}")
        suite, kwargs = id.removeprefix("libero/"), dict(options.kwargs or {})
        obs_keys = options.obs_keys
        cameras = tuple(options.cameras) or CAMERAS
        assets = _find_assets(id, kwargs.pop("assets", None))
        names, instructions = _tasks(id, assets)
        selected = _select_tasks(id, kwargs.pop("tasks", None), len(names))
        self._drawn = len(selected) if kwargs.pop("draw_tasks", False) else 0
        task = _assign_tasks(options.seeds, len(selected), drawn=bool(self._drawn))
        used = selected if self._drawn else [selected[i] for i in task]
        if self._drawn:
            kwargs["drawn"] = tuple(selected)
        options = replace(
            options,
            cameras=cameras,
            obs_keys=None if obs_keys is None else (*obs_keys, *cameras),
            kwargs={
                "suite": suite,
                "tasks": tuple(selected[i] for i in task),
                "assets": str(assets),
                "cameras": cameras,
                "image_size": tuple(options.image_size),
                "scenes": libero_task.read_scenes(suite, used, assets),
                **kwargs,
            },
        )
        spec = EnvSpec(id, vector_entry_point=make_tasks, max_episode_steps=TIME_LIMITS[suite])
        super().__init__(id, options, spec=spec)
        # ``make_tasks`` returns Gymnasium's vector, which copies observations, takes one seed per
        # environment and can reset single environments.
        self._has_own_vector = False
        self.task_names = tuple(names[i] for i in selected)
        self.task = torch.tensor(task, device=self.device)
        read = (lambda obs: self.task) if len(selected) > 1 else None
        self._observe_sentences([instructions[i] for i in selected], read)

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, 7]."""
        return replace(super().step(action), task=self.task.clone())

    def restart(self, seeds: list[int]) -> None:
        """Store new seeds. The ``reset`` that must follow applies them."""
        super().restart(seeds)
        if self._drawn:
            task = _assign_tasks(seeds, self._drawn, drawn=True)
            self.task = torch.tensor(task, device=self.device)
        # ``reset`` then keeps the environments. Building a scene takes 5 to 20 s, and an episode
        # depends on its seed only.
        self._done = None


# ------------------------------------------------------------------------------------- installation
def _find_assets(id: str, assets: str | None) -> Path:
    """Return the folder with LIBERO's meshes and textures; raise EnvError if they are missing."""
    folders = [package_folder(id) / "assets", Path("~/.cache/libero/assets").expanduser()]
    if assets is not None:
        folders = [Path(assets).expanduser()]
    for folder in folders:
        if all((folder / name).is_dir() for name in _ASSETS):
            return folder
    known = next((x for x in folders if x.is_dir() and any(x.iterdir())), None)
    missing = [name for name in _ASSETS if known is None or not (known / name).is_dir()]
    state = f"{folders[-1]} is missing" if known is None else f"{known} lacks {missing[0]}"
    raise EnvError(
        f"download LIBERO's meshes and textures (206 MB): {_DOWNLOAD} ~/.cache/libero/assets"
        f" (elsewhere: write env.kwargs.assets=FOLDER); env.id={id}: {state}"
    )


def _tasks(id: str, assets: Path) -> tuple[list[str], list[str]]:
    """Return names and instructions of a suite's tasks, in the benchmark's order."""
    hint = "install it with scripts/constraints-libero.txt, and uninstall torchvision"
    with wrap_errors(f"env.id={id}: hf-libero cannot be imported (", f"); {hint}"):
        benchmark = libero_task.import_benchmark(id, assets)
    with discard_output(stderr=True):
        suite = benchmark.get_benchmark_dict()[id.removeprefix("libero/")]()
    tasks = [suite.get_task(i) for i in range(suite.n_tasks)]
    return [task.name for task in tasks], [task.language for task in tasks]


def _assign_tasks(seeds: Sequence[int], count: int, *, drawn: bool) -> list[int]:
    """Return the task of each environment, of ``count``; a group with one seed has one task."""
    if drawn:
        return [drawn_task(seed, count) for seed in seeds]
    group = [0]
    for before, seed in itertools.pairwise(seeds):
        group.append(group[-1] + (seed != before))
    return [g * count // (group[-1] + 1) for g in group]


def _select_tasks(id: str, tasks: int | Sequence[int] | None, count: int) -> list[int]:
    """Return the task indices of ``kwargs.tasks``; raise EnvError if one is out of range."""
    selected = [tasks] if isinstance(tasks, int) else list(range(count) if tasks is None else tasks)
    if not selected or any(not 0 <= i < count for i in selected):
        raise EnvError(f"env.id={id}: tasks={tasks} must be indices from 0 to {count - 1}")
    return selected
