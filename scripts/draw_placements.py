"""Draw the schedule of each preset of ``placement=`` for docs/placement.md.

    python scripts/draw_placements.py        (writes docs/placements/NAME.svg)

The rows are the processes of ``placement.plan`` on two devices, the phases those of
``placement.PHASES``. Durations are examples: a step of the simulator takes as long as a decision,
an update as long as four of them.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from embodied_ppo.config.placement import PHASES, Hardware, Plan, plan

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "placements"
COLOURS = {
    "env": "#4c9a6a",
    "rollout": "#4a7fb5",
    "actor": "#c8793a",
    "publish": "#8a5aa8",
    "offloaded": "#e4e4e4",
}
WORDS = {
    "env": "simulate",
    "rollout": "act",
    "actor": "train",
    "publish": "weights",
    "offloaded": "offloaded (GPU)",
}
STEPS, UPDATES, LEARN, PUBLISH = 4, 2, 4.0, 0.6
"""Steps of a rollout, number of updates, and durations of an update and of publishing in steps of
the simulator."""
WIDTH, LEFT, LANE, GAP = 480, 112, 18, 5
"""Pixels: width of the image and of its labels, height of a row, distance of rows."""


@dataclass(frozen=True)
class Work:
    """Work of ``role`` from ``begin`` to ``end``.

    ``kind`` selects the colour, ``stage`` is the part of the environments.
    """

    role: str
    begin: float
    end: float
    phase: str
    kind: str
    stage: int = 0


def plans() -> dict[str, Plan]:
    """Return the presets on two devices, and one with a lag."""
    two = Hardware((2,))
    drawn = {"local": plan("fused", Hardware((1,)))}
    drawn |= {name: plan(name, two) for name in ("fused", "colocated", "disaggregated")}
    drawn["disaggregated_lag"] = plan("disaggregated", two, max_lag=1)
    return drawn | {"hybrid": plan("hybrid", two), "pipelined": plan("pipelined", two, stages=2)}


def collect(p: Plan, begin: float) -> list[Work]:
    """Return decisions and steps of one rollout; stages overlap."""
    duration = 1.0 / p.stages
    works = []
    for step in range(STEPS):
        for stage in range(p.stages):
            start = begin + duration * (2 * step + stage)
            middle, end = start + duration, start + 2 * duration
            works.append(Work("rollout", start, middle, "collect", "rollout", stage))
            works.append(Work("env", middle, end, "collect", "env", stage))
    return works


def schedule(p: Plan) -> list[Work]:
    """Return the work in the order of the training loop.

    The loop collects until more than ``max_lag`` rollouts are pending, updates, and publishes. A
    rollout keeps the weights with which it started.
    """
    works: list[Work] = []
    ends: list[float] = []  # end of each rollout
    rollout = actor = 0.0  # time from which each role is idle
    for update in range(UPDATES):
        while len(ends) <= update + p.max_lag:
            works += (collected := collect(p, rollout))
            rollout = max(w.end for w in collected)
            ends.append(rollout)
        begin = max(ends[update], actor)
        actor = begin + LEARN
        works.append(Work("actor", begin, actor, "update", "actor"))
        if p.fused("rollout", "actor"):
            rollout = actor
            continue
        rollout = max(rollout, actor)
        works += [
            Work("actor", actor, actor + PUBLISH, "publish", "publish"),
            Work("rollout", rollout, rollout + PUBLISH, "publish", "publish"),
        ]
        rollout, actor = rollout + PUBLISH, actor + PUBLISH
    return works


def draw(p: Plan) -> str:
    """Return the schedule as SVG."""
    works = schedule(p)
    last = max(w.end for w in works)
    scale = (WIDTH - LEFT - 8) / last
    lines: list[str] = []
    top = 6.0

    def box(begin: float, end: float, kind: str, faint: bool = False) -> str:
        x, width = LEFT + begin * scale, (end - begin) * scale
        shade = ' fill-opacity="0.55"' if faint else ""
        return (
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{LANE}"'
            f' fill="{COLOURS[kind]}"{shade}/>'
        )

    for device in range(p.hardware.total):
        lines.append(f'<text x="6" y="{top + 11:.1f}" font-weight="bold">device {device}</text>')
        top += 16
        for group in (g for g in p.groups if device in g.devices):
            lines.append(f'<text x="6" y="{top + 13:.1f}">{html.escape(group.name)}</text>')
            lines.append(f'<path d="M{LEFT} {top + LANE:.1f}H{WIDTH - 8}" stroke="#bbb"/>')
            if p.sharing(group):
                for phase in ("collect", "update"):
                    if not set(PHASES[phase]) & set(group.roles):
                        lines += [box(a, b, "offloaded") for a, b in spans(works, phase)]
            lines += [
                box(w.begin, w.end, w.kind, faint=w.stage > 0)
                for w in works
                if w.role in group.roles
            ]
            top += LANE + GAP
        top += 4
    kinds = [kind for kind in COLOURS if any(f'"{COLOURS[kind]}"' in line for line in lines)]
    x = 6.0
    for kind in kinds:
        lines.append(
            f'<rect x="{x:.1f}" y="{top + 4:.1f}" width="10" height="10" fill="{COLOURS[kind]}"/>'
        )
        lines.append(f'<text x="{x + 14:.1f}" y="{top + 13:.1f}">{WORDS[kind]}</text>')
        x += 28 + 6.6 * len(WORDS[kind])
    lines.append(
        f'<text x="{WIDTH - 8}" y="{top + 13:.1f}" text-anchor="end" fill="#666">time →</text>'
    )
    height = round(top + 20)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}"'
    )
    head += ' font-family="sans-serif" font-size="12" shape-rendering="crispEdges">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, ground, *lines, "</svg>"]) + "\n"


def spans(works: list[Work], phase: str) -> list[tuple[float, float]]:
    """Return begin and end of each occurrence of ``phase``."""
    merged: list[tuple[float, float]] = []
    for w in sorted((w for w in works if w.phase == phase), key=lambda w: w.begin):
        if merged and w.begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], w.end))
        else:
            merged.append((w.begin, w.end))
    return merged


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, p in plans().items():
        (FOLDER / f"{name}.svg").write_text(draw(p), encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
