"""Write the table of docs/scaling.md: four VLA models on nine machines, planned without weights.

python scripts/plan_table.py                       # all models, about ten minutes of CPU time
python scripts/plan_table.py openvla_oft           # the rows of one recipe

It calls what ``embodied-ppo plan experiment=NAME --devices N --device-gb GB`` calls.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from embodied_ppo.config.compose import prepare
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.models.vla.published import PREFIX, RECIPES
from embodied_ppo.modes import machine_plan
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
MODELS = {
    "pi0_libero": "π0",
    "pi05_libero": "π0.5",
    "smolvla_libero": "SmolVLA",
    "openvla_oft": "OFT-7B",
}
"""Recipe -> name of its model."""
MACHINES = [(devices, memory) for memory in (24, 80, 141) for devices in (1, 2, 8)]
"""(GPUs, GB of each)."""
HEADER = (
    "| model | GPUs | placement | micro-batch | weights | gradients | AdamW | experience |"
    " activations | total, GB | simulate | act | train | exchange | an update, s (range) |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)
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
        memory: GB of each.
        estimators: Models of earlier rows of the same recipe.
    """
    start = f"| {MODELS[name]} | {devices} x {memory} |"
    try:
        planned = machine_plan.plan_for(recipe(name), devices, memory, estimators)
    except PlacementError as error:
        needed = re.search(r"= ([\d.]+ GB) to", str(error))
        cure = str(error).rpartition("the smallest change that fits: ")[2].partition(", which")[0]
        size = needed[1] if needed else "more"
        return f"{start} does not fit ({size}); `{cure}` does |" + " |" * 12
    options = [planned.config.placement]
    for path, text in (
        ("model.gradient_checkpointing", "gradients recomputed"),
        ("algorithm.rollout_micro_batch_size", "acting in parts"),
        ("cluster.shard", "shards"),
    ):
        options += [text] if path in planned.changes else []
    (need,) = planned.needs.values()
    sizes = [f"{size / 1e9:.1f}" for size in (*need.values(), sum(need.values()))]
    s = planned.seconds
    assert s is not None and s.simulate is not None
    phases = [f"{x:.3g}" for x in (s.simulate, s.act, s.learn, s.exchange)]
    total = f"{_round(s.total)} ({_round(s.low)} to {_round(s.high)})"
    cells = [", ".join(options), str(planned.micro_batch), *sizes, *phases, total]
    return f"{start} {' | '.join(cells)} |"


def _round(seconds: float) -> str:
    """Return two significant digits without an exponent."""
    return f"{float(f'{seconds:.2g}'):g}"


def rows_of_page(text: str) -> dict[tuple[str, str], str]:
    """Return (model, machine) -> row of the table in the page."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1] in MODELS.values():
            rows[cells[1], cells[2]] = line
    return rows


def write(names: Sequence[str]) -> None:
    """Compute the rows of recipes and write the table into the page after each recipe."""
    for name in names:
        estimators: Estimators = {}
        for devices, memory in MACHINES:
            line = row(name, devices, memory, estimators)
            print(line, flush=True)
            text = PAGE.read_text(encoding="utf-8")
            rows = rows_of_page(text) | {(MODELS[name], f"{devices} x {memory}"): line}
            order = [(m, f"{n} x {gb}") for m in MODELS.values() for n, gb in MACHINES]
            table = "\n".join([*HEADER, *(rows[key] for key in order if key in rows)])
            begin, end = "<!-- plans -->\n", "\n<!-- /plans -->"
            before, _, after = text.partition(begin)
            PAGE.write_text(before + begin + table + end + after.partition(end)[2], "utf-8")


def main() -> None:
    """Parse the names of recipes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", choices=[[], *MODELS], default=[])
    write(parser.parse_args().recipes or list(MODELS))


if __name__ == "__main__":
    main()
