"""Draw episodes of trained policies into one image, a row of frames for each episode.

    python scripts/contact_sheet.py docs/results/tabletop.png RUN [RUN ..] --episodes 2
    --split unseen_combination

The title of a row is the instruction and the result. Evaluation is deterministic with seeds that
training never uses. The last frame shows the decision before the end of the episode.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from embodied_ppo import run as build
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.training import checkpoint

mpl.use("Agg")
from matplotlib import pyplot as plt


@torch.inference_mode()
def episode(run: str, seed: int, kwargs: dict[str, Any], size: int) -> tuple[str, list[Tensor]]:
    """Return instruction and result, and an image uint8 [size, size, 3] before each decision."""
    source, _, trained = build.open_run(run)
    config = replace(trained.env, kwargs={**trained.env.kwargs, **kwargs})
    env: Any = embodied.make_env(
        [seed], config=config, device=torch.device("cpu"), render=True, size=size
    )
    try:
        policy = embodied.make_policy(replace(trained, env=config), env)
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
        obs = env.reset()
        evaluation.set_instructions(policy, env.instructions)
        instruction, images = env.instructions[int(obs["instruction"][0])], []
        while True:
            images.append(env.render())
            step = env.step(policy.act(policy.encode(obs)).action)
            if bool((step.terminated | step.truncated)[0]):
                result = "success" if bool(step.success[0]) else "failure"
                return f"{instruction}: {result}", images
            obs = step.obs
    finally:
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--episodes", type=int, default=2, help="of each run")
    parser.add_argument("--pictures", type=int, default=7, help="images of each episode")
    parser.add_argument("--split", default="train", help="split of the task's instructions")
    parser.add_argument("--size", type=int, default=192, help="pixels")
    args = parser.parse_args()
    seeds = evaluation.evaluation_seeds(10_000, args.episodes)
    rows = [
        episode(run, seed, {"split": args.split}, args.size) for run in args.runs for seed in seeds
    ]
    figure, axes = plt.subplots(
        len(rows), figsize=(1.4 * args.pictures, 1.15 * len(rows)), squeeze=False
    )
    for (title, images), ax in zip(rows, axes.flat, strict=True):
        indices = torch.linspace(0, len(images) - 1, args.pictures).round().long().tolist()
        table = slice(int(0.24 * args.size), int(0.87 * args.size))
        ax.imshow(torch.cat([images[i][table] for i in indices], dim=1))
        ax.set_axis_off()
        ax.set_title(f"{title} ({len(images)} decisions)", loc="left", fontsize=8)
    figure.subplots_adjust(0.005, 0.005, 0.995, 1 - 0.25 / (1.15 * len(rows)), hspace=0.25)
    figure.savefig(args.out, dpi=130)
    print(args.out)


if __name__ == "__main__":
    main()
