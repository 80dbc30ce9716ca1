"""Runs that are killed, whose disk fills up and that lose a worker equal undisturbed ones.

Memory and descriptors stay constant. The test trains dozens of updates; a long run of one case is

    LONG_RUN_UPDATES=20000 python -m pytest tests/drills/test_long_runs.py -k robot-local
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.drills.test_disk_and_clock import UNSHARE, needs_namespaces
from tests.integration.test_resume import assert_same, contents, state_of

ROOT = Path(__file__).resolve().parents[2]
UPDATES = int(os.environ.get("LONG_RUN_UPDATES", "40"))
# Updates between checkpoints; there are evaluations half as often.
EVERY = max(4, UPDATES // 1000)
COMMON = f"threads=1 device=cpu compile=never save_every={EVERY} eval_every={2 * EVERY}"
ROBOT = f"""{COMMON} env_steps=null env.num_threads=1 evaluation.video_episodes=0
    evaluation.episodes=2 algorithm.update_epoch=2"""
FAMILIES = {
    "robot": f"""experiment=cartpole {ROBOT} env.num_envs=8 algorithm.horizon=16
        algorithm.global_batch_size=64 model.hidden=[16] algorithm.reward_norm=running""",
    "vla": f"""experiment=tabletop_token {ROBOT} env.num_envs=2 algorithm.horizon=4
        algorithm.global_batch_size=4 env.image_size=16 env.action_chunk=2 env.max_episode_steps=9
        model.width=8 model.depth=1 cloning.steps=0""",
    "language": f"""experiment=arithmetic {COMMON} actor.model.architecture.hidden_size=16
        actor.model.architecture.num_hidden_layers=1 actor.model.architecture.intermediate_size=16
        warm_start.steps=2 algorithm.rollout_batch_size=8 algorithm.global_batch_size=4
        algorithm.missing_eos_penalty=0.5 evaluation.episodes=4 reward.workers=1
        reward.grader={ROOT}/scripts/examples/own_reward.py:close_enough""",
}
RAY = " cluster.devices_per_node=2 cluster.max_restarts=1000 placement="
CASES = {
    "robot-local": FAMILIES["robot"],
    "vla-local": FAMILIES["vla"],
    "language-local": FAMILIES["language"],
}
if UPDATES > 40:  # shorter ones with Ray are in test_placement_failures.py
    CASES["robot-ray"] = FAMILIES["robot"] + RAY + "hybrid"
    CASES["vla-ray"] = FAMILIES["vla"] + RAY + "hybrid"
    CASES["language-ray"] = FAMILIES["language"] + RAY + "disaggregated"
# Exit codes after a kill, a full disk and a lost worker; other runs replace the worker.
RESTARTS = {"robot-local": "-9 3 3", "vla-local": "-9 3 3"}

# Spawned graders import the main module again if it is a file.
START = "from tests.drills import disturbed_training; disturbed_training.start()"
INSIDE = 'mount -t tmpfs -o size=$1 tmpfs "$2" && cd "$2" && shift 2 && "$@" && cp -r run "$OUT"'


def train(folder: Path, options: str, disturbances: dict[int, str]) -> list[dict[str, Any]]:
    """Train on a disk of its own, then copy the run to ``folder``; return its use of memory."""
    (folder / "disk").mkdir(parents=True)
    program = [sys.executable, "-c", START, str(folder), str(UPDATES // 40)]
    arguments = [json.dumps(disturbances), f"updates={UPDATES}", *options.split()]
    shell = [*UNSHARE, "sh", "-c", INSIDE, "sh", f"{8 + UPDATES // 100}m", str(folder / "disk")]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "envs")))
    environment = os.environ | {"PYTHONPATH": path, "OUT": str(folder)}
    done = subprocess.run([*shell, *program, *arguments], env=environment, capture_output=True)
    err = done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in err, err
    assert err.count("error: free space") == list(disturbances.values()).count("disk"), err
    return [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("case", CASES)
def test_disturbed_run_equals_an_undisturbed_one(case: str, tmp_path) -> None:
    one, other = tmp_path / "undisturbed", tmp_path / "disturbed"
    usage = train(one, CASES[case], {})
    names = ["kill", "disk", "worker"] * max(1, UPDATES // 5000)
    moments = [UPDATES * i // (len(names) + 1) + 1 for i in range(1, len(names) + 1)]
    train(other, CASES[case], dict(zip(moments, names, strict=True)))
    restarts = RESTARTS.get(case, "-9 3").split() * (len(names) // 3)
    assert (other / "codes").read_text().split() == [*restarts, "0"]
    assert_same(contents(other / "run", UPDATES), contents(one / "run", UPDATES))
    assert state_of(other / "run") == state_of(one / "run")
    first, second = usage[: len(usage) // 2], usage[len(usage) // 2 :]
    for name, tolerance in {"descriptors": 0, "threads": 0, "rss_mb": 8, "workers_mb": 8}.items():
        values = [[row[name] for row in half] for half in (first, second)]
        # A median: a checkpoint that is being written has a descriptor for a moment.
        assert statistics.median(values[1]) <= max(values[0]) + tolerance, values
