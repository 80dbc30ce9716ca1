"""RLinf's files that lack only paths train two updates, with tiny models and a tiny LIBERO.

One file of each family and algorithm; RLINF_ALL=1 pytest .. trains all 26.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import fake_libero
import pytest
import run_helpers
import tiny_openvla_checkpoint
import tiny_pi0_checkpoint

from embodied_ppo.commands import main
from embodied_ppo.tools.import_config import convert
from tests.tools.import_config.test_rlinf_files import FILES, READY

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libero") is not None, reason="LIBERO itself is installed"
)
REPRESENTATIVES = run_helpers.words("""libero_spatial_ppo_openpi libero_10_grpo_openpi_pi05
    libero_spatial_async_ppo_openpi_pi05 libero_goal_grpo_openvlaoft libero_spatial_0_grpo_mlp""")


def write_model(folder: Path, name: str, unnorm_key: str | None) -> Path:
    """Write a tiny checkpoint of the family of a file, for LIBERO's 8 states and 7 actions."""
    if unnorm_key is None:
        kind = "pi05" if "pi05" in name else "pi0"
        return tiny_pi0_checkpoint.write_checkpoint(
            folder, kind=kind, asset="libero", chunk_size=10
        )
    tiny_openvla_checkpoint.write_checkpoint(folder)
    action = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    (folder / "dataset_statistics.json").write_text(json.dumps({unnorm_key: {"action": action}}))
    return folder


def train_tiny(options: dict[str, Any], folder: Path, name: str, **more: Any) -> list[Any]:
    """Train experiment/x.yaml below the current folder for two updates; return their metrics."""
    chunk, group = options["env.action_chunk"], options["algorithm.group_size"]
    envs = max(2, group)
    # 3 optimiser steps of an epoch
    small = run_helpers.options(f"""env.num_envs={envs} env.max_episode_steps={2 * chunk}
        env.image_size=32 env.kwargs.processes='false' algorithm.horizon=2
        algorithm.rollout_epoch=3 algorithm.global_batch_size={2 * envs} evaluation.num_envs=2
        algorithm.micro_batch_size={envs} evaluation.episodes=2 evaluation.video_episodes=0
        updates=2 run_dir=run device=cpu""")
    small |= more
    if "model.checkpoint" in options:
        key = options.get("model.unnorm_key")
        small["model.checkpoint"] = write_model(folder, name, key)
        small |= {} if key is None else {"model.bins": 16}
    arguments = ["train", "--config-dir", ".", "experiment=x"]
    if "cluster.component_placement" in options:
        arguments.append("~cluster.component_placement")
    assert main.main([*arguments, *(f"{path}={value}" for path, value in small.items())]) == 0
    trained = [row for row in run_helpers.metric_rows(Path("run")) if "policy/loss" in row]
    assert len(trained) == 2
    return trained


@pytest.fixture(autouse=True)
def tiny_libero(tmp_path, monkeypatch) -> None:
    """Run in an empty folder, with the recorded interface of LIBERO."""
    fake_libero.install(tmp_path / "packages", monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READY if os.environ.get("RLINF_ALL") else REPRESENTATIVES)
def test_file_trains_two_updates(name: str, tmp_path) -> None:
    Path("file.yaml").write_text(json.dumps(run_helpers.nested(FILES[name])))
    assert main.main(["import-config", "rlinf", "file.yaml", "--out", "experiment/x.yaml"]) == 0
    options = convert.convert("rlinf", "file.yaml").options
    for row in train_tiny(options, tmp_path / "model", name):
        group = options["algorithm.group_size"]
        assert row["rollout/episodes"] == 3 * max(2, group)
        if group > 1:
            assert 0 <= row["rollout/groups_dropped"] <= 3 * max(2, group) // group


SIMPLEVLA = """
DATASET_NAME="{suite}"
python -u -m verl.trainer.main_ppo \\
    data.task_suite_name=$DATASET_NAME data.n_samples=8 data.filter_accuracy=True \\
    data.accuracy_lower_bound=0.1 data.accuracy_upper_bound=0.9 data.train_batch_size=64 \\
    data.val_batch_size=496 actor_rollout_ref.model.path=sft \\
    actor_rollout_ref.model.vla=openvla-oft \\
    actor_rollout_ref.model.action_token_len=7 actor_rollout_ref.model.action_chunks_len=8 \\
    actor_rollout_ref.actor.optim.lr=5e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=1 actor_rollout_ref.actor.grad_clip=1 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_low=0.2 \\
    actor_rollout_ref.rollout.num_images_in_input=1 actor_rollout_ref.rollout.use_proprio=False \\
    actor_rollout_ref.rollout.temperature=1.6 actor_rollout_ref.rollout.unnorm_key=$DATASET_NAME \\
    actor_rollout_ref.rollout.num_steps_wait=10 actor_rollout_ref.rollout.center_crop=True \\
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=25 trainer.test_freq=4 \\
    trainer.total_epochs=100 algorithm.adv_estimator=grpo
"""


@pytest.mark.slow
def test_script_of_simplevla_becomes_an_experiment(tmp_path, capsys) -> None:
    Path("run.sh").write_text(SIMPLEVLA.format(suite="libero_10"))
    assert main.main(["import-config", "verl", "run.sh", "--out", "experiment/x.yaml"]) == 0
    result = convert.convert("verl", "run.sh")
    assert result.mode == "embodied" and set(result.to_write) == {"updates"}
    assert result.conflict is None and not result.refused and not result.unknown
    expected = {
        "env.id": "libero/libero_10",
        "env.num_envs": 64,
        "algorithm.rollout_epoch": 8,  # 64 prompts x 8 samples = 512 episodes
        "algorithm.horizon": 64,
        "algorithm.global_batch_size": 128 * 64,  # 128 trajectories
        "algorithm.minibatch_unit": "column",
        "algorithm.loss_agg_func": "trajectory-mean",
        "algorithm.normalize_advantages": False,
        "algorithm.group_filter": "success",
        "model.unnorm_key": "libero_10_no_noops",
        "model.omit_stop_token": False,
        "model.temperature": 1.6,
        "eval_every": 4,
    }
    assert {path: result.options[path] for path in expected} == expected
    rounds = {"algorithm.group_filter_rounds": 2}
    train_tiny(result.options, tmp_path / "model", "oft", **rounds)
    # RoboTwin has no adapter.
    Path("twin.sh").write_text(SIMPLEVLA.format(suite="robotwin2_lift_pot"))
    capsys.readouterr()
    assert main.main(["import-config", "verl", "twin.sh", "--out", "twin.yaml"]) == 2
    assert "robotwin2_lift_pot" in capsys.readouterr().err and not Path("twin.yaml").exists()
