"""Batch sizes of an update, computed by hand, and their line in the log of a run."""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers

from embodied_ppo.options import loader
from embodied_ppo.options.batch_sizes import MinibatchSchedule, batches, lines
from embodied_ppo.options.schema import Config
from embodied_ppo.programs import runs

ROBOT = run_helpers.options("""env.id=CartPole-v1 env.num_envs=32 algorithm.horizon=32
    algorithm.global_batch_size=128""")
LANGUAGE = run_helpers.options("""mode=reasoning data.task=arithmetic
    algorithm.loss_type=actor algorithm.rollout_batch_size=64 algorithm.global_batch_size=16
    algorithm.update_epoch=2 algorithm.group_size=4 updates=10""")
LANGUAGE |= {"actor.model.architecture": {"model_type": "qwen2"}}


def test_update_of_a_robot_policy() -> None:
    c = run_helpers.tiny_config(
        {**ROBOT, "algorithm.update_epoch": 4, "env_steps": 51_000, "updates": None}
    )
    b = batches(c)
    assert (b.samples, b.critic, b.actor.steps) == (1024, None, 32)
    assert b.actor == MinibatchSchedule(4, 8, 128)
    assert lines(c) == [
        "32 environments x 32 steps = 1,024 samples per update",
        "4 epochs x 8 minibatches of 128 = 32 optimiser steps",
        "49 updates x 1,024 = 50,176 environment steps",  # 51,000 / 1,024 = 49.8
    ]


def test_chunks_and_micro_batches() -> None:
    options = {"env.action_chunk": 5, "algorithm.micro_batch_size": 48, "updates": 2}
    c = run_helpers.tiny_config({**ROBOT, **options, "algorithm.update_epoch": 1})
    assert lines(c) == [
        "32 environments x 32 decisions = 1,024 samples per update",
        "1 epoch x 8 minibatches of 128 = 8 optimiser steps (micro-batches of at most 48 samples)",
        "2 updates x 5,120 = at most 10,240 environment steps",  # 1,024 x 5
    ]


def language(**more: Any) -> Config:
    options = LANGUAGE | {name.replace("__", "."): value for name, value in more.items()}
    return loader.load(Config, run_helpers.nested(options), source="configs/small")


def test_update_of_a_language_model() -> None:
    assert lines(language()) == [
        "64 prompts x 4 responses = 256 responses per update",
        "2 epochs x 4 minibatches of 16 prompts = 8 optimiser steps",
        "10 updates = 2,560 responses of at most 512 tokens",
    ]
    limits = {"algorithm__micro_batch_tokens": 900, "algorithm__micro_batch_size": 8}
    c = language(critic__global_batch_size=32, critic__update_epoch=1, **limits)
    assert batches(c).critic == MinibatchSchedule(1, 2, 32)
    assert (
        lines(c)[1]
        == "actor: 2 epochs x 4 minibatches of 16 prompts = 8 optimiser steps (micro-batches of at"
        " most 8 responses and 900 tokens); critic: 1 epoch x 2 minibatches of 32 prompts = 2"
        " optimiser steps"
    )
    assert batches(language(algorithm__adv_type="grpo")).critic is None


@pytest.mark.parametrize("quiet", [False, True])
def test_run_logs_batch_sizes_once(quiet: bool, tmp_path, capsys) -> None:
    small = run_helpers.options("""env.num_envs=4 algorithm.horizon=8 algorithm.global_batch_size=32
        updates=2""")
    c = run_helpers.tiny_config(
        {**ROBOT, **small, "run_dir": str(tmp_path / "run"), "evaluation.episodes": 1}
    )
    summary = runs.train(c, quiet=quiet)
    log, err = (tmp_path / "run" / "log.txt").read_text(), capsys.readouterr().err
    for line in lines(c):
        assert log.count(line) == 1 and err.count(line) == (0 if quiet else 1)
    assert summary["env_steps"] == 64 and "2 updates x 32 = 64 environment steps" in log
