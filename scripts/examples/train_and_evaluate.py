"""Train a policy from Python, then evaluate its checkpoint.

    python scripts/examples/train_and_evaluate.py [RUN_DIR]

The same as `embodied-ppo train env.id=CartPole-v1 ..` followed by `embodied-ppo evaluate`. Every
option of the command line is a field of ``Config``; ``load`` refuses unknown names and wrong
values.
"""

from __future__ import annotations

import sys

from embodied_ppo import run
from embodied_ppo.config.loader import load
from embodied_ppo.config.schema import Config, EvaluateConfig


def main(run_dir: str = "runs/example", updates: int = 30) -> dict[str, float]:
    """Return the result of 20 new episodes of a policy trained for ``updates`` updates."""
    config = load(
        Config,
        {
            "name": "example",
            "run_dir": run_dir,
            "updates": updates,
            "env": {"id": "CartPole-v1", "num_envs": 8},
            "algorithm": {
                "horizon": 32,
                "global_batch_size": 64,
                "update_epoch": 4,
                "value_clip": None,
            },
            "evaluation": {"episodes": 5, "video_episodes": 0},
        },
    )
    summary = run.train(config, quiet=True)
    print(
        f"return before training {summary['initial_return']:.1f}, after"
        f" {summary['final_return']:.1f}"
    )
    result = run.evaluate(EvaluateConfig(checkpoint=run_dir, episodes=20, video=False), quiet=True)
    print(f"20 new episodes: {result['eval/return']:.1f}, report {result['report']}")
    return result


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
