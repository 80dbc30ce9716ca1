"""Draw who works when in each preset of ``placement=``, for docs/placement.md.

    python scripts/draw_placements.py        (writes docs/placements/NAME.svg)

Lanes are the processes of ``plan.plan`` on two devices, phases those of ``plan.PHASES``. Lengths
are made up: a step of the simulator takes as long as a decision, an update as long as four of them.
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
    "asleep": "#e4e4e4",
}
WORDS = {
    "env": "simulate",
    "rollout": "act",
    "actor": "learn",
    "publish": "weights",
    "asleep": "asleep (GPU)",
}
STEPS, UPDATES, LEARN, PUBLISH = 4, 2, 4.0, 0.6
"""Steps of a rollout, updates drawn; an update's and a publication's length, in steps of the
simulator.
"""
WIDTH, LEFT, LANE, GAP = 480, 112, 18, 5
"""Pixels: of a drawing, of its labels, of a lane, between lanes."""


@dataclass(frozen=True)
class Work:
    """``role`` works from ``begin`` to ``end``; ``kind`` is its colour, ``stage`` the part of the
    environments.
    """

    role: str
    begin: float
    end: float
    phase: str
    kind: str
    stage: int = 0


def plans() -> dict[str, Plan]:
    """What is drawn: the presets on two devices, and one that overlaps."""
    two = Hardware((2,))
    drawn = {"local": plan("fused", Hardware((1,)))}
    drawn |= {name: plan(name, two) for name in ("fused", "colocated", "disaggregated")}
    drawn["disaggregated_lag"] = plan("disaggregated", two, max_lag=1)
    return drawn | {"hybrid": plan("hybrid", two), "pipelined": plan("pipelined", two, stages=2)}


def collect(p: Plan, begin: float) -> list[Work]:
    """Decisions and steps of one rollout; with stages, one part's decision beside the other's
    step.
    """
    one = 1.0 / p.stages
    found = []
    for step in range(STEPS):
        for stage in range(p.stages):
            at = begin + one * (2 * step + stage)
            found.append(Work("rollout", at, at + one, "collect", "rollout", stage))
            found.append(Work("env", at + one, at + 2 * one, "collect", "env", stage))
    return found


def schedule(p: Plan) -> list[Work]:
    """The loop's order: collect until more than ``max_lag`` rollouts wait, update, publish. A
    rollout that is under way ends with the weights it began with."""
    found: list[Work] = []
    ends: list[float] = []  # of the rollouts
    rollout = actor = 0.0  # when each is free
    for update in range(UPDATES):
        while len(ends) <= update + p.max_lag:
            found += (made := collect(p, rollout))
            rollout = max(w.end for w in made)
            ends.append(rollout)
        begin = max(ends[update], actor)
        actor = begin + LEARN
        found.append(Work("actor", begin, actor, "update", "actor"))
        if p.fused("rollout", "actor"):
            rollout = actor
            continue
        rollout = max(rollout, actor)
        found += [
            Work("actor", actor, actor + PUBLISH, "publish", "publish"),
            Work("rollout", rollout, rollout + PUBLISH, "publish", "publish"),
        ]
        rollout, actor = rollout + PUBLISH, actor + PUBLISH
    return found


def draw(p: Plan) -> str:
    works = schedule(p)
    last = max(w.end for w in works)
    scale = (WIDTH - LEFT - 8) / last
    lines: list[str] = []
    top = 6.0

    def box(work_from: float, to: float, kind: str, faint: bool = False) -> str:
        x, width = LEFT + work_from * scale, (to - work_from) * scale
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
                        lines += [box(a, b, "asleep") for a, b in spans(works, phase)]
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
    """From when to when each turn of ``phase`` lasts."""
    found: list[tuple[float, float]] = []
    for w in sorted((w for w in works if w.phase == phase), key=lambda w: w.begin):
        if found and w.begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], w.end))
        else:
            found.append((w.begin, w.end))
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, p in plans().items():
        (FOLDER / f"{name}.svg").write_text(draw(p), encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
