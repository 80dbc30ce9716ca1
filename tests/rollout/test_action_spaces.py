"""Composite actions, masks of choices and nested observations, from training to export."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import run_helpers
import torch
from gymnasium import spaces

import embodied_ppo
from embodied_envs import make
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_ppo.programs import runs
from embodied_ppo.tools.deploy import bundle, policy_export, policy_server, run_policy
from tests.integration.test_resume import check_resume

SPACES: dict[str, spaces.Space[Any]] = {
    "multi": spaces.MultiDiscrete([3, 2], start=[5, -1]),
    "binary": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict(
        {"grip": spaces.Discrete(3, start=10), "arm": spaces.Box(-2, 2, (2,), np.float64)}
    ),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, ()), spaces.Dict({"a": spaces.MultiBinary(2)}))),
    "matrix": spaces.Box(-2, 2, (2, 2)),
    "integers": spaces.Box(0, 4, (2,), np.int64),
}
CHOICES = {"multi": 5, "binary": 8, "dict": 3, "tuple": 4}
OBS = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "tuple": spaces.Tuple((spaces.Discrete(4, start=2), spaces.Box(-1, 1, (), np.float16))),
    "dict": spaces.Dict(
        {"a": spaces.Tuple((spaces.Box(-9, 9, (2,), np.int8),)), "b": spaces.Discrete(2)}
    ),
}


class Spaces(gymnasium.Env):
    """Accepts only actions of its space and of the mask; the first choice should follow a sign."""

    metadata: ClassVar = {"render_modes": []}

    def __init__(self, kind: str = "multi", mask: str | None = None, obs: str = "box") -> None:
        self.kind, self.mask = kind, mask
        self.action_space = SPACES[kind]
        self.obs = OBS[obs]
        self.observation_space = self.obs
        if mask is not None:
            size = spaces.MultiBinary(CHOICES[kind])
            self.observation_space = spaces.Dict({"x": self.obs, "action_mask": size})

    def _observe(self) -> Any:
        self.obs.seed(int(self.np_random.integers(2**31)))
        self.x = self.obs.sample()
        if self.mask is None:
            return self.x
        self.possible = np.ones(CHOICES.get(self.kind, 1), np.int8)
        self.possible[0] = self.np_random.random() < 0.5
        if self.mask == "zero" and self.t == 3:
            self.possible[:3] = 0
        return {"x": self.x, "action_mask": self.possible}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), (action, self.action_space)
        first: Any = action
        while isinstance(first, dict | tuple):
            first = first[0] if isinstance(first, tuple) else next(iter(first.values()))
        start = {"multi": 5, "dict": 10}.get(self.kind, 0)
        value = float(np.ravel(action["grip"] if self.kind == "dict" else first)[0])
        if self.mask == "obs" and self.kind != "tuple":
            assert self.possible[int(value) - start]
        x = self.x[0] if isinstance(self.x, np.ndarray) else 0.0
        reward = float(value - start == 1 + (x > 0))
        if self.kind == "dict":
            reward -= float(np.abs(action["arm"] - x).mean())
        self.t += 1
        return self._observe(), reward, False, self.t >= 10, {}


gymnasium.register("test/Spaces-v0", entry_point=Spaces)
needs_onnx = pytest.mark.skipif(
    not all(find_spec(name) for name in bundle.PACKAGES) and "NO_SKIPS" not in os.environ,
    reason="needs onnx and onnxruntime: pip install 'embodied-ppo[export]'",
)


def options(run_dir: Path, updates: int = 2, **kwargs: Any) -> Any:
    task = {key: kwargs.pop(key) for key in ("kind", "mask", "obs") if key in kwargs}
    base = run_helpers.options("""env.id=test/Spaces-v0 env.simulator=gymnasium env.num_envs=4
        env.num_threads=0 evaluation.episodes=2 evaluation.video_episodes=0 compile=never""")
    base |= {"env.kwargs": task, "updates": updates, "run_dir": str(run_dir)}
    return run_helpers.tiny_config(base | kwargs)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a.dtype == b.dtype and np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-5)


@needs_onnx
@pytest.mark.filterwarnings("ignore:.*is a Box of integers")
@pytest.mark.parametrize(
    ("kind", "mask", "obs"),
    [
        ("multi", "obs", "box"),
        ("binary", "obs", "tuple"),
        ("tuple", None, "dict"),
        ("matrix", None, "box"),
    ],
)
def test_training_api_and_bundle_agree(kind: str, mask: str | None, obs: str, tmp_path) -> None:
    """The environment refuses actions outside of its space, in training, evaluation and here."""
    runs.train(options(tmp_path / "run", kind=kind, mask=mask, obs=obs), quiet=True)
    policy_export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    exported = run_policy.Policy(tmp_path / "out")
    policy, env = embodied_ppo.load(tmp_path / "run"), Spaces(kind, mask, obs)
    seen, _ = env.reset(seed=0)
    for _ in range(10):
        action = policy.act(seen)
        assert env.action_space.contains(action)
        assert equal(exported.act(seen), action)
        seen, *_ = env.step(action)
    served: Any = policy_server.Served(policy, {}).metadata["actions"]
    expected: Any = tree.map(lambda x: {"shape": [1, *np.shape(x)], "dtype": str(x.dtype)}, action)
    assert expected == served or expected.items() <= served.items()
    if mask is None:
        batch = gymnasium.vector.utils.batch_space(env.observation_space, 3).sample()
        vector = gymnasium.vector.utils.batch_space(env.action_space, 3)
        assert vector.contains(policy.act(batch)) and equal(exported.act(batch), policy.act(batch))


def test_runs_resume_bit_for_bit(tmp_path) -> None:
    runs.train(options(tmp_path / "run", 4, kind="dict", mask="obs", save_every=2), quiet=True)
    check_resume(tmp_path / "run", tmp_path / "half", at=2, updates=4)


def envs(kind: str, mask: str | None = None, obs: str = "box", **extra: Any) -> Any:
    kwargs = {"kind": kind, "mask": mask, "obs": obs}
    return make(
        "test/Spaces-v0", num_envs=2, seeds=[0, 1], simulator="gymnasium", kwargs=kwargs, **extra
    )


def test_mask_without_a_possible_value_is_refused(tmp_path) -> None:
    mode = {"env.kwargs.autoreset_mode": "same_step"}
    config = options(tmp_path, kind="multi", mask="zero", **mode)
    with pytest.raises(EnvError, match="environment 0"):
        run_helpers.tiny_rollout(config).collect(8, update=0, version=0)


def test_integers_are_rounded_and_clipped() -> None:
    with pytest.warns(UserWarning, match="rounded to the nearest"):
        env = envs("integers")
    # low + (a + 1) * 2: 0, 0.4, 2.6, 4
    action = env.to_simulator(torch.tensor([[-1.0, -0.8], [0.3, 7.0]]))
    assert action.dtype == torch.int64 and action.tolist() == [[0, 0], [3, 4]]
