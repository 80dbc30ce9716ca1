"""``deterministic=true``: runs with one seed on one GPU are equal, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_helpers
from run_helpers import run_process

COMMAND = (sys.executable, "-m", "embodied_ppo.commands.main")
COMMON = run_helpers.words("""updates=4 save_every=2 deterministic=true algorithm.update_epoch=2
    evaluation.episodes=16 evaluation.video_episodes=0""")
# Contacts and limits of joints; a policy with memory, and one with images and attention.
ROBOT = "env.simulator=warp algorithm.horizon=16 algorithm.global_batch_size=1024"
RUNS = {
    "ant": f"{ROBOT} env.id=Ant env.num_envs=256",
    "humanoid": f"{ROBOT} env.id=Humanoid env.num_envs=256 model.recurrent=gru"
    " algorithm.minibatch_unit=column",
    "tabletop": f"{ROBOT} env.id=Tabletop env.num_envs=256 env.cameras=[front] env.image_size=32"
    " env.action_chunk=4 model.policy=token model.width=32 model.shared_backbone=true",
    "language": "experiment=arithmetic",
    "language_bfloat16": "experiment=arithmetic actor.model.dtype=bfloat16",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_runs_repeat(name: str, tmp_path: Path, device: str = "cuda") -> None:
    """Updates from new weights, and after a resume, are equal to the run's."""
    options = (*RUNS[name].split(), *COMMON, f"device={device}", f"run_dir={tmp_path / 'run'}")
    run_process(*COMMAND, "train", "--quiet", *options, timeout=None)
    certificate = (*COMMAND, "verify", "--json", tmp_path / "run", "--updates", "all")
    content = json.loads(run_process(*certificate, timeout=None))
    assert content["verdict"] == "verified" and not content["first_difference"]
