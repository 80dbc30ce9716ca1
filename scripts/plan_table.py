"""Write the table of docs/scaling.md: plans of four VLA models for nine machines.

python scripts/plan_table.py                       # all models, about ten minutes of CPU time
python scripts/plan_table.py openvla_oft           # the rows of one recipe
python scripts/plan_table.py --measure             # speed of small models on this CPU

It calls the same function as ``embodied-ppo plan experiment=NAME --devices N --device-gb GB``. It
needs no weights and no GPU.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.config.compose import prepare
from embodied_ppo.config.schema import AlgorithmConfig, Config, ModelConfig
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.core.types import ArraySpec, Box
from embodied_ppo.models.vla import pi0_files, published
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pi05 import PI05
from embodied_ppo.models.vla.published import PREFIX, RECIPES
from embodied_ppo.models.vla.smolvla import SmolVLA
from embodied_ppo.modes import machine_plan
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator
from embodied_ppo.placement import memory_estimate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
MODELS = {
    "pi0_libero": "π0",
    "pi05_libero": "π0.5",
    "smolvla_libero": "SmolVLA",
    "openvla_oft": "OFT-7B",
}
"""Recipe -> name of its model."""
MACHINES = [(devices, memory) for memory in (24, 80, 141) for devices in (1, 2, 8)]
"""(Number of GPUs, memory of each in GB)."""
HEADER = (
    "| model | GPUs | placement | micro-batch | weights | gradients | AdamW | experience |"
    " activations | total, GB | simulate | act | train | exchange | update, s (range) |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)
BEGIN, END = "<!-- plans -->\n", "\n<!-- /plans -->"
"""Lines of the page around the table."""
Estimators = dict[bool, EmbodiedMemoryEstimator]


def recipe(name: str) -> Config:
    """Return a shipped recipe with the published sizes of its model."""
    args = argparse.Namespace(command="plan", config_dir=None, config_name=None)
    options = [f"experiment={name}", f"model.checkpoint={PREFIX}{RECIPES[name]}"]
    return prepare(args, options).config


def row(name: str, devices: int, memory: int, estimators: Estimators) -> str:
    """Return a row of the table.

    Args:
        name: Recipe.
        devices: Number of GPUs.
        memory: Memory of each GPU, GB.
        estimators: Estimators of earlier rows of the same recipe, see ``machine_plan.plan_for``.
    """
    start = f"| {MODELS[name]} | {devices} x {memory} |"
    try:
        planned = machine_plan.plan_for(recipe(name), devices, memory, estimators)
    except PlacementError as error:
        needed = re.search(r"= ([\d.]+ GB) to", str(error))
        change = str(error).rpartition("the smallest change that fits: ")[2].partition(", which")[0]
        size = needed[1] if needed else "more"
        return f"{start} does not fit (needs {size}); fits with `{change}` |" + " |" * 12
    options = [planned.config.placement]
    for path, text in (
        ("model.gradient_checkpointing", "activations recomputed"),
        ("algorithm.rollout_micro_batch_size", "acting in parts"),
        ("cluster.shard", "shards"),
    ):
        options += [text] if path in planned.changes else []
    (need,) = planned.needs.values()
    sizes = [f"{size / 1e9:.1f}" for size in (*need.values(), sum(need.values()))]
    s = planned.seconds
    assert s is not None and s.simulate is not None
    phases = [_rounded(x, 3) for x in (s.simulate, s.act, s.learn, s.exchange)]
    total = f"{_rounded(s.total, 2)} ({_rounded(s.low, 2)} to {_rounded(s.high, 2)})"
    cells = [", ".join(options), str(planned.micro_batch), *sizes, *phases, total]
    return f"{start} {' | '.join(cells)} |"


def _rounded(seconds: float, digits: int) -> str:
    """Return a number with ``digits`` significant digits and without an exponent, such as 1,790."""
    return f"{float(f'{seconds:.{digits}g}'):,g}"


def rows_of_page(text: str) -> dict[tuple[str, str], str]:
    """Return (model, machine) -> row of the table between BEGIN and END in the page."""
    rows = {}
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1] in MODELS.values():
            rows[cells[1], cells[2]] = line
    return rows


def write(names: Sequence[str]) -> None:
    """Compute the rows of recipes, and write the table into the page after each row."""
    for name in names:
        estimators: Estimators = {}
        for devices, memory in MACHINES:
            line = row(name, devices, memory, estimators)
            print(line, flush=True)
            text = PAGE.read_text(encoding="utf-8")
            rows = rows_of_page(text) | {(MODELS[name], f"{devices} x {memory}"): line}
            order = [(m, f"{n} x {gb}") for m in MODELS.values() for n, gb in MACHINES]
            table = "\n".join([*HEADER, *(rows[key] for key in order if key in rows)])
            before, _, after = text.partition(BEGIN)
            PAGE.write_text(before + BEGIN + table + END + after.partition(END)[2], "utf-8")


# ---------------------------------------------------------------------------------------- measure
class Spaces:
    """One camera of 64 x 64 pixels, a state of eight numbers, and chunks of five actions."""

    instructions = ("pick up the bowl",)
    obs_spec: dict[str, ArraySpec] = {  # noqa: RUF012
        "state": ArraySpec((8,)),
        "front": ArraySpec((3, 64, 64), torch.uint8),
    }
    action_spec = Box((-1.0,) * 35, (1.0,) * 35)


def small_sizes(kind: str) -> dict[str, Any]:
    """Return config.json of a model: a third to a half of the published widths, four layers."""
    text = {"hidden_size": 768, "intermediate_size": 3072}
    if kind == "smolvla":
        text = {"hidden_size": 480, "intermediate_size": 1280, "vocab_size": 1000}
        text |= {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 32}
        vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4}
        vision |= {"num_attention_heads": 6, "image_size": 128, "patch_size": 16}
        sizes = {"text": text, "vision": vision, "scale_factor": 2}
        return {"type": kind, "num_vlm_layers": 4, "vlm_config": sizes}
    gemma = pi0_files.GEMMA | {"num_hidden_layers": 4, "head_dim": 96, "vocab_size": 1000}
    vision = pi0_files.SIGLIP | {"hidden_size": 576, "intermediate_size": 2152}
    vision |= {"num_hidden_layers": 4, "num_attention_heads": 8, "image_size": 112}
    vlm = {"model_type": "paligemma", "projection_dim": 768, "image_token_id": 1000}
    vlm |= {"text_config": gemma | text, "vision_config": vision | {"projection_dim": 768}}
    expert = gemma | {"hidden_size": 384, "intermediate_size": 1536}
    return {"type": kind, "vlm_config": vlm, "dit_config": expert}


def cpu_seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Return the smallest CPU time of several calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def measure() -> None:
    """Print counted operations, CPU time, and the speed relative to a matrix product."""
    torch.set_num_threads(1)
    spaces, rows = Spaces(), 8
    x = torch.randn(1024, 1024)
    print("model    phase  GFLOP per decision  ms     GFLOP/s  relative to a matrix product")
    for kind, policy_class in (("pi0", PI0), ("pi05", PI05), ("smolvla", SmolVLA)):
        contents = published.flow_sizes(small_sizes(kind), kind, spaces, 5, device="cpu")
        config = ModelConfig(policy="flow", freeze_trunk=True, flow_steps=4)
        policy = policy_class(
            spaces.obs_spec,
            spaces.action_spec,
            config,
            contents,
            chunk=5,
            sentences=spaces.instructions,
        )
        policy.planned_memory_gb = 0.0  # minibatches compute the prefixes, as in the table
        algorithm = AlgorithmConfig(horizon=1, global_batch_size=rows, micro_batch_size=rows)
        learner = actor_critic_learner(policy, algorithm, num_envs=rows, updates=1, seed=0)
        cpu = torch.device("cpu")
        _, obs, decision = memory_estimate.estimate_acting(policy, spaces.obs_spec, cpu, rows)
        counted = memory_estimate.count_operations(policy, learner, obs, decision, rows)
        real = {n: torch.zeros(rows, *s.shape, dtype=s.dtype) for n, s in spaces.obs_spec.items()}
        noise = policy.noise(rows)
        d = policy.act(policy.encode(real), noise=noise)
        trajectory = memory_estimate.empty_trajectory(real, d, 1)
        batch = memory_estimate.micro_batch(policy.encode(real), cpu, trajectory, rows, algorithm)
        batch = replace(batch, action=d.action, replay=d.replay)

        def act(policy: PI0 = policy, real: Any = real, noise: Any = noise) -> None:
            policy.act(policy.encode(real), noise=noise)

        def learn(learner: Any = learner, batch: Any = batch) -> None:
            count = losses.denominator(batch.mask)
            learner.optimizer.loss(batch, count, count, entropy_coef=0.0)[0].backward()

        for phase, function, operations in (
            ("act", act, counted.act),
            ("train", learn, counted.learn),
        ):
            peak = 2 * 1024**3 / cpu_seconds(lambda: x @ x)
            seconds = cpu_seconds(function)
            speed = operations * rows / seconds
            cells = f"{operations / 1e9:<19.3g} {seconds * 1e3:<6.0f} {speed / 1e9:<8.1f}"
            print(f"{kind:8} {phase:6} {cells} {speed / peak:.2f}", flush=True)


def main() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", choices=[[], *MODELS], default=[])
    parser.add_argument("--measure", action="store_true", help="time small models on this CPU")
    args = parser.parse_args()
    if args.measure:
        measure()
    else:
        write(args.recipes or list(MODELS))


if __name__ == "__main__":
    main()
