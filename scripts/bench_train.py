"""CPU time per environment step of training, next to the simulator alone with random actions, in one run.

python scripts/bench_train.py [experiment=NAME] [any.option=value ...]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile

UPDATES = 40


def cpu_us() -> float:
    """User and system time of this process, microseconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e6


def simulator_alone(config: dict) -> float:
    """CPU microseconds per environment step with random actions."""
    import torch

    import embodied_envs
    from embodied_ppo.types import Discrete

    env_options, n = config["env"], config["env"]["num_envs"]
    env = embodied_envs.make(
        env_options["id"],
        num_envs=n,
        seeds=list(range(n)),
        simulator=env_options["simulator"],
        num_threads=env_options["num_threads"] or None,
        kwargs=env_options["kwargs"],
    )
    env.reset()
    steps = UPDATES * config["algorithm"]["horizon"]
    spec = env.action_spec
    if isinstance(spec, Discrete):
        actions = torch.randint(spec.n, (steps + 20, n))
    else:
        actions = torch.rand(steps + 20, n, spec.size) * 2 - 1
    for t in range(20):
        env.step(actions[t])
    start = cpu_us()
    for t in range(steps):
        env.step(actions[20 + t])
    used = cpu_us() - start
    env.close()
    return used / (steps * n)


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = sys.argv[1:]
    cli = [sys.executable, "-m", "embodied_ppo.cli"]
    with tempfile.TemporaryDirectory() as folder:
        options = [*words, f"updates={UPDATES}", "save_every=0", "evaluation.episodes=1", "evaluation.video_episodes=0"]
        done = subprocess.run(
            [*cli, "train", "--quiet", "--json", *options, f"run_dir={folder}/run"], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        summary = json.loads(done.stdout)
        import yaml

        with open(f"{folder}/run/config.yaml") as f:
            config = yaml.safe_load(f)
    alone = simulator_alone(config)
    total = summary["cpu_us_per_step"]
    print(f"experiment            {config['name']} ({config['env']['id']}, {config['env']['num_envs']} environments)")
    print(f"training              {total:8.1f} CPU us per environment step, {summary['steps_per_s']:,.0f} steps/s wall")
    print(f"simulator alone       {alone:8.1f} CPU us per environment step")
    print(f"ratio                 {total / alone:8.2f}")
    print(f"peak memory           {summary['peak_rss_mb']:8.0f} MB")


if __name__ == "__main__":
    main()
