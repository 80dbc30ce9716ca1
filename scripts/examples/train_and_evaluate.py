"""Train a policy from Python, evaluate its checkpoint, and use it in Gymnasium.

    python scripts/examples/train_and_evaluate.py [RUN_DIR]

The same as `embodied-ppo train env.id=CartPole-v1 ..` followed by `embodied-ppo evaluate`. Every
option of the command line is a keyword; unknown names and wrong values raise ConfigError.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

import embodied_ppo as ep


def main(run_dir: str = "runs/example", updates: int = 30) -> dict[str, Any]:
    """Return the result of 20 new episodes of a policy trained for ``updates`` updates."""
    run = ep.train(
        name="example",
        run_dir=run_dir,
        updates=updates,
        env={"id": "CartPole-v1", "num_envs": 8},
        algorithm={"horizon": 32, "global_batch_size": 64, "update_epoch": 4, "value_clip": None},
        evaluation={"episodes": 5, "video_episodes": 0},
    )
    before = run.metrics[0]["eval/return"]
    print(f"return before training {before:.1f}, after {run.final_return:.1f}")
    result = ep.evaluate(run_dir, episodes=20, video=False)
    print(f"20 new episodes: {result['eval/return']:.1f}, report {result['report']}")

    policy, env = ep.load(run_dir), gymnasium.make("CartPole-v1")
    obs, steps, ended = env.reset(seed=0)[0], 0, False
    while not ended:
        obs, _, terminated, truncated, _ = env.step(policy.act(obs))
        steps, ended = steps + 1, terminated or truncated
    print(f"an episode in Gymnasium: {steps} steps")
    return result


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
