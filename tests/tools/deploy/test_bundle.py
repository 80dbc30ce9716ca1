"""Deployment bundles: what `export` writes, and what run_policy.py finds wrong with it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.evaluation import checkpoint_evaluation
from embodied_ppo.evaluation.episodes import evaluation_seeds
from embodied_ppo.options.schema import EvaluateConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout import environments
from embodied_ppo.tools.deploy import bundle, policy_export, run_policy
from embodied_ppo.tools.deploy.run_policy import BundleError, Policy
from embodied_ppo.training import trained_run

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in bundle.PACKAGES) and "NO_SKIPS" not in os.environ,
    reason="needs onnx and onnxruntime: pip install 'embodied-ppo[export]'",
)
STEPS = 100
CHEETAH: dict[str, Any] = run_helpers.options("""env.id=HalfCheetah evaluation.episodes=2
    evaluation.video_episodes=0 compile=never updates=3""")
CHEETAH |= {"env.max_episode_steps": STEPS}
JOINTS = ["bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]


@pytest.fixture(scope="module")
def cheetah(tmp_path_factory) -> Path:
    """A folder with the run ``run`` and its bundle ``out``."""
    folder = tmp_path_factory.mktemp("cheetah")
    run_helpers.train(folder / "run", CHEETAH)
    summary = policy_export.export(str(folder / "run"), str(folder / "out"))
    assert summary["recorded_steps"] == 4 * STEPS and summary["action_difference"] < 1e-6
    return folder


@pytest.fixture(scope="module")
def policy(cheetah: Path) -> Policy:
    return Policy(cheetah / "out", expected_hz=20, action_names=JOINTS)


def damaged(cheetah: Path, out: Path, change: Callable[[ActorCritic], None]) -> Path:
    """Return a bundle whose policy.onnx is of a changed policy."""
    shutil.copytree(cheetah / "out", out)
    run = trained_run.open_run(str(cheetah / "run"))
    source, config = run.source, run.config
    env = environments.make_env([0], config=config.env, device=torch.device("cpu"))
    actor = robot_policy.make_policy(config, env)
    assert isinstance(actor, ActorCritic)
    actor.load_state_dict(source.policy())
    with torch.no_grad():
        change(actor)
    specs: Any = {"obs": env.obs_spec}
    converter = environments.action_converter(config.env, env)
    env.close()
    bundle._write_onnx(bundle.Exported(actor, specs, converter).eval(), specs, out / "policy.onnx")
    return out


# ------------------------------------------------------------------------------- what export writes
def test_policy_json_names_order_units_limits_and_origin(cheetah: Path) -> None:
    info = json.loads((cheetah / "out" / "policy.json").read_text())
    (observation,), (action,) = info["inputs"], info["outputs"]
    assert observation["shape"] == [17] and len(observation["names"]) == 17
    assert action["names"] == JOINTS and action["low"] == [-1] * 6 and action["high"] == [1] * 6
    assert all(2e-6 <= x < 1e-5 for x in action["tolerance"])
    assert info["control"] == {"step_s": 0.05, "rate_hz": 20, "action_chunk": 1}
    assert info["action_mapping"] == "rescale"
    assert [joint["name"] for joint in info["joints"]][-6:] == JOINTS
    assert info["actuators"][0] == {
        **{"name": "bthigh", "joint": "bthigh", "kind": "motor", "unit": "N m/gear"},
        **{"gear": 120, "range": [-1, 1], "kp": None, "kd": None, "force": None},
    }
    assert info["ctrl_of_action"] == {"offset": [0] * 6, "scale": [1] * 6}
    source = trained_run.open_run(str(cheetah / "run")).source
    weights = source.manifest["files"]["policy.pt"]["sha256"]
    assert info["checkpoint"]["sha256"] == weights and info["checkpoint"]["update"] == 3
    assert {"torch", "onnxruntime"} <= info["versions"].keys()


def check_returns(policy: Policy, run: Path, out: Path, rtol: float) -> None:
    """Compare the report's returns with those of the bundle, twice: ``reset`` starts anew.

    The simulator executes the bundle's actions without a mapping of its own.
    """
    options = EvaluateConfig(str(run), episodes=2, video=False, out=str(out))
    checkpoint_evaluation.evaluate(options, quiet=True)
    report = json.loads((out / "report.json").read_text())
    config, seeds = trained_run.open_run(str(run)).config.env, evaluation_seeds(0, 2)
    config = replace(config, action_mapping="none")
    env = environments.make_env(seeds, config=config, device=torch.device("cpu"))
    for _ in range(2):
        env.restart(seeds)
        obs, total = env.reset(), np.zeros(2)
        policy.reset()
        for _ in range(STEPS):
            assert isinstance(obs, torch.Tensor)
            step = env.step(torch.from_numpy(policy.act(obs.numpy())))
            obs, total = step.obs, total + step.reward.double().numpy()
        assert bool(step.truncated.all())
        returns = [episode["return"] for episode in report["episodes"]]
        np.testing.assert_allclose(total, returns, rtol=rtol)
    env.close()


def test_evaluation_through_the_bundle_gives_the_reports_return(
    cheetah: Path, policy: Policy, tmp_path
) -> None:
    check_returns(policy, cheetah / "run", tmp_path, 1e-4)


def test_run_policy_needs_neither_torch_nor_the_package(cheetah: Path) -> None:
    ast.parse((cheetah / "out" / "run_policy.py").read_text(), feature_version=(3, 8))
    code = (
        "import runpy, sys; sys.argv = ['run_policy.py', '--check', '--expected-hz', '20']\n"
        "try: runpy.run_path('run_policy.py', run_name='__main__')\n"
        "except SystemExit as error: code = error.code\n"
        "print(code, sorted({'torch', 'embodied_ppo', 'mujoco'} & set(sys.modules)))"
    )
    output = run_helpers.run_process(sys.executable, "-c", code, cwd=cheetah / "out")
    assert output.splitlines() == ["replayed 400 steps: no difference", "0 []"]


@pytest.mark.parametrize(
    "options",
    [
        {"env.id": "toy_envs:named_cart_pole", "env.num_threads": 0},
        {"env.id": "toy_envs:Grouped", "env.obs_keys": ["state"], "model.distribution": "beta"},
        run_helpers.options(
            "env.id=toy_envs:Grouped env.action_chunk=2 env.max_episode_steps=40"
            " model.actor_obs=[state] model.critic_obs=[state,privileged]"
            " model.distribution=squashed_gaussian"
        ),
    ],
)
def test_choices_chunks_and_groups(options: dict[str, Any], tmp_path) -> None:
    common = {"evaluation.episodes": 1, "evaluation.video_episodes": 0, "updates": 1}
    run_helpers.train(tmp_path / "run", {**common, "compile": "never", **options})
    policy_export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    policy = Policy(tmp_path / "out")
    golden = policy.golden
    if "env.action_chunk" in options:
        assert list(policy.inputs) == ["state"]  # not the critic's
        assert policy.actions["action"]["names"] == ["push@0", "push@1"]
        assert policy.act(golden["observation/state"][0]).shape == (2, 1)
        assert policy.info["ctrl_of_action"] is not None
        assert set(golden["episode"]) > {0, 1, 2, 3}  # episodes of at most 20 decisions
    elif "env.obs_keys" in options:
        assert policy.act(golden["observation/state"][0]).tolist() == golden["action"][0].tolist()
    else:
        obs = dict.fromkeys(policy.inputs, golden["observation/action"][:5])
        assert policy.act(obs).tolist() == golden["output/action"][:5].tolist()
        assert policy.outputs["output/logits"]["tolerance"] is not None


# ----------------------------------------------------------------------------------- planted faults
def swap_joints(actor: ActorCritic) -> None:
    for x in (actor.policy_head.weight, actor.policy_head.bias):
        x[[1, 4]] = x[[4, 1]].clone()


def flip_sign(actor: ActorCritic) -> None:
    for x in (actor.policy_head.weight, actor.policy_head.bias):
        x[2] *= -1


def change_scale(actor: ActorCritic) -> None:
    for x in (actor.policy_head.weight, actor.policy_head.bias):
        x[0] *= 0.5


def spoil_weight(actor: ActorCritic) -> None:
    actor.policy_head.bias[1] = np.nan


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (spoil_weight, ["output 'action' of policy.onnx is not finite"]),
        (swap_joints, ["bshin differs by up to", "swapped with fshin", "swapped with bshin"]),
        (flip_sign, ["action: bfoot differs", "the opposite sign"]),
        (change_scale, ["action: bthigh differs", "a scale of 0.5"]),
    ],
)
def test_replay_names_faults_of_the_network(
    change: Callable[[ActorCritic], None], messages: list[str], cheetah: Path, tmp_path
) -> None:
    out = damaged(cheetah, tmp_path / "out", change)
    with pytest.raises(BundleError) as error:
        Policy(out)
    for message in messages:
        assert message in str(error.value)
    intact = set(JOINTS) - {name for name in JOINTS if name in " ".join(messages)}
    if change is not spoil_weight:
        assert not any(f"action: {name} " in str(error.value) for name in intact)


def recorded(policy: Policy) -> dict[str, Any]:
    """Return a recording without faults: float32 noise of a pipeline in other units and back."""
    return {
        "observation/obs": np.float32(np.deg2rad(np.rad2deg(policy.golden["observation/obs"]))),
        "action": policy.golden["action"].copy(),
        "time_s": np.arange(len(policy.golden["action"])) * 0.05,
    }


OBS, ACTION = "observation/obs", "action"


@pytest.mark.parametrize(
    ("key", "change", "findings"),
    [
        (
            OBS,
            lambda x: x[:, [0, 1, 3, 2, *range(4, 17)]],
            ["swapped with bshin position", "swapped with"],
        ),
        (
            OBS,
            lambda x: x * np.where(np.arange(17) == 5, -1, 1),
            ["fthigh position .*opposite sign"],
        ),
        (OBS, lambda x: x * np.where(np.arange(17) == 4, 57.29578, 1), ["degrees instead of rad"]),
        (
            OBS,
            lambda x: x + np.where(np.arange(17) == 9, 0.5, 0),
            ["rootz velocity .*offset of 0.5"],
        ),
        (OBS, lambda x: np.where(np.arange(17) == 3, np.nan, x), ["bshin position is not finite$"]),
        (OBS, lambda x: np.concatenate([x[:1], x[:-1]]), ["is delayed by 1 step"] * 17),
        (ACTION, lambda x: x[:, [3, 1, 2, 0, 4, 5]], ["bthigh .*swapped with fthigh", "fthigh"]),
        (ACTION, lambda x: x[:, [0, 1, 1, 3, 4, 5]], ["action: bfoot .*: is bshin$"]),
        (ACTION, lambda x: x * [1, 1, 0, 1, 1, 1], ["action: bfoot .*is constant, 0"]),
        ("time_s", lambda x: x / 2, ["time_s is 40 Hz, and the policy was trained at 20 Hz"]),
    ],
)
def test_comparison_names_faults_of_a_pipeline(
    key: str, change: Callable[[Any], Any], findings: list[str], policy: Policy
) -> None:
    recording = recorded(policy)
    recording[key] = change(recording[key])
    if key == OBS:
        del recording[ACTION]
        recording[OBS] = recording[OBS].astype(np.float32)
    lines = policy.compare(recording)
    assert len(lines) == len(findings), lines
    for line, finding in zip(lines, findings, strict=True):
        assert line.startswith(("control rate", key))
        for part in finding.rstrip("$").split(" .*"):
            assert part in line
        assert not finding.endswith("$") or line.endswith(finding.rstrip("$").split(" .*")[-1])


def test_images_and_damaged_files(policy: Policy, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (3, 8, 9, 3), dtype=np.uint8)
    for changed, text in ((image[..., ::-1], "differs by"), (image / 255, "dtype float64")):
        (line,) = run_policy.describe_image("camera", image, changed)
        assert text in line
    assert run_policy.describe_image("camera", image, image ^ 1) == []
    # A damaged recording, and one whose times are equal.
    file = tmp_path / "recording.npz"
    np.savez(file, **recorded(policy))
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(BundleError, match="not a file of numpy"):
        policy.compare(str(file))
    (line,) = policy.compare({"time_s": np.zeros(9)})
    assert line.startswith("control rate")
    with pytest.raises(BundleError, match="the recording has episode"):
        policy.compare({"episode": np.zeros(9)})
    with pytest.raises(BundleError, match="has phase"):
        policy.compare({**recorded(policy), "phase": np.zeros(9)})
    out = shutil.copytree(policy.folder, tmp_path / "out")
    (out / "policy.onnx").write_bytes((out / "policy.onnx").read_bytes()[:500])
    assert run_policy.main(["--folder", str(out), "--check"]) == 2


@pytest.mark.parametrize(
    ("options", "observation", "message"),
    [
        ({"expected_hz": 50}, None, "expected_hz is 50 Hz"),
        ({"action_names": JOINTS[::-1]}, None, "0 is ffoot instead of bthigh"),
        ({}, np.zeros(16), r"\(17,\)"),
        ({}, np.where(np.arange(17) == 3, np.nan, 0), "bshin position"),
    ],
)
def test_what_the_integrator_expects_and_gives_is_checked(
    options: dict[str, Any], observation: Any, message: str, cheetah: Path
) -> None:
    with pytest.raises(BundleError, match=message):
        Policy(cheetah / "out", check=False, **options).act(observation)


# ----------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [(("format",), 3, "format 3"), (("outputs", 0, "name"), "action", "")],
)
def test_bundles_that_cannot_be_read_are_refused(
    path: tuple[Any, ...], value: Any, message: str, cheetah: Path, tmp_path
) -> None:
    shutil.copytree(cheetah / "out", tmp_path / "out")
    file = tmp_path / "out" / "policy.json"
    node = info = json.loads(file.read_text())
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file.write_text(json.dumps(info))
    assert run_policy.main(["--folder", str(tmp_path / "out"), "--check"]) == (2 if message else 0)
    if message:
        with pytest.raises(BundleError, match=message):
            Policy(tmp_path / "out")


# -------------------------------------------------------------------------------------- with memory
@pytest.fixture(scope="module")
def remembering(tmp_path_factory) -> Path:
    """A folder with a run and the bundle of a policy with a history and a recurrent critic."""
    folder = tmp_path_factory.mktemp("memory")
    options = run_helpers.options("""model.history=3 model.recurrent=lstm
        model.recurrent_size=4 model.shared_backbone=false algorithm.minibatch_unit=column""")
    options |= {**CHEETAH, "env.kwargs": {"velocities": False}}
    run_helpers.train(folder / "run", options)
    summary = policy_export.export(str(folder / "run"), str(folder / "out"))
    assert summary["recorded_steps"] == 4 * STEPS and summary["action_difference"] < 1e-5
    return folder


@pytest.mark.slow
def test_memory_is_an_input_and_an_output(remembering: Path) -> None:
    info = json.loads((remembering / "out" / "policy.json").read_text())
    shapes = {x["name"]: x["shape"] for x in info["inputs"]}
    assert shapes == {
        "obs": [8],
        "memory/obs": [2, 8],
        "memory/previous_actions": [2, 6],
        "memory/in_episode": [2],
        "memory/recurrent": [8],  # of the actor; that of the critic is not exported
    }
    outputs = {x["name"]: x["shape"] for x in info["outputs"] if x["role"] == "memory"}
    assert outputs == {f"next_{k}": shape for k, shape in shapes.items() if k != "obs"}


def test_evaluation_through_a_bundle_with_memory_gives_the_reports_return(
    remembering: Path, tmp_path
) -> None:
    policy = Policy(remembering / "out")
    check_returns(policy, remembering / "run", tmp_path, 1e-3)
    with pytest.raises(BundleError, match="3 rows, and 2 in the step before"):
        policy.act(np.zeros((3, 8), np.float32))


def test_single_episodes_of_a_bundle_with_memory_start_anew(remembering: Path) -> None:
    policy, alone = (Policy(remembering / "out", check=False) for _ in range(2))
    for _ in range(3):
        policy.act(np.ones((2, 8), np.float32))
    policy.reset([False, True])
    action = policy.act(np.ones((2, 8), np.float32))
    np.testing.assert_allclose(action[1], alone.act(np.ones(8, np.float32)), atol=1e-6)
    assert np.abs(action[0] - action[1]).max() > 1e-4


def test_network_with_an_operation_that_onnx_lacks_is_refused(tmp_path) -> None:
    file = tmp_path / "bessel.py"
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, shapes):\n"
        "        super().__init__()\n"
        "    def forward(self, inputs):\n"
        "        return torch.special.bessel_j0(inputs['obs'])\n"
    )
    run_helpers.train(tmp_path / "run", {**CHEETAH, "model.network": f"{file}:Net", "updates": 1})
    with pytest.raises(ConfigError, match=r"no counterpart in ONNX .*special_bessel_j0"):
        policy_export.export(str(tmp_path / "run"), str(tmp_path / "out"))
