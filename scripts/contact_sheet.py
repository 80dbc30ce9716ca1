"""Episodes of trained policies in one picture, a row for each: what they were told, and what they
did.

    python scripts/contact_sheet.py docs/results/tabletop.png RUN [RUN ..] --episodes 2 --split
    unseen_combination

Greedy, seeds that no training has seen; the last picture shows the decision before the one that
ended the episode.
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
    """What was said and how it ended, and a picture uint8 [size, size, 3] before every decision."""
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
        said, pictures = env.instructions[int(obs["instruction"][0])], []
        while True:
            pictures.append(env.render())
            step = env.step(policy.act(policy.encode(obs)).action)
            if bool((step.terminated | step.truncated)[0]):
                return f"{said}: {'success' if bool(step.success[0]) else 'failure'}", pictures
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
    parser.add_argument("--pictures", type=int, default=7, help="of each episode")
    parser.add_argument("--split", default="train", help="of the task's language")
    parser.add_argument("--size", type=int, default=192, help="pixels")
    args = parser.parse_args()
    seeds = evaluation.evaluation_seeds(10_000, args.episodes)
    rows = [
        episode(run, seed, {"split": args.split}, args.size) for run in args.runs for seed in seeds
    ]
    figure, axes = plt.subplots(
        len(rows), figsize=(1.4 * args.pictures, 1.15 * len(rows)), squeeze=False
    )
    for (said, pictures), ax in zip(rows, axes.flat, strict=True):
        shown = torch.linspace(0, len(pictures) - 1, args.pictures).round().long().tolist()
        table = slice(int(0.24 * args.size), int(0.87 * args.size))
        ax.imshow(torch.cat([pictures[i][table] for i in shown], dim=1))
        ax.set_axis_off()
        ax.set_title(f"{said} ({len(pictures)} decisions)", loc="left", fontsize=8)
    figure.subplots_adjust(0.005, 0.005, 0.995, 1 - 0.25 / (1.15 * len(rows)), hspace=0.25)
    figure.savefig(args.out, dpi=130)
    print(args.out)


if __name__ == "__main__":
    main()
