"""Somebody who can do every task of Tabletop: a controller that looks at the true state, for
demonstrations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_envs.tasks.tabletop import APART, HALF, LOW, OPEN, RULES, STEP, Tabletop
from embodied_envs.tasks.task import State

TRAVEL, HOP = 0.125, 0.08
"""Heights (m) at which the tool crosses the table: with a block or over stacks, and over single
blocks.
"""
BEHIND = 0.06
"""From the block's centre to where the tool comes down to push it."""
PUSH_STEP = 0.55
"""Action while pushing: slow enough for the block to stop with the gripper."""


class Expert:
    """``expert(env.s)`` -> action [N, 4]; ``env`` steps the ``task`` that this was made with.

    Every world's next action follows from its present state alone: a hand that is led astray tries
    again.
    """

    def __init__(self, task: Tabletop, device: torch.device | str = "cpu") -> None:
        """``task`` is bound; ``device`` is where its worlds are."""
        self.task = task
        rules = [RULES[name] for name in task.names]

        def column(flags: list[bool]) -> Tensor:
            return torch.tensor(flags, device=device)[:, None]

        self._tool, self._push = (
            column([rule.moves == how for rule in rules]) for how in ("tool", "push")
        )
        self._touch, self._gather = (
            column([name == x for name in task.names]) for x in ("touch", "gather")
        )
        self._keep = column(["free" not in rule.bounds for rule in rules])
        self._both = column(["b_flat" in rule.bounds for rule in rules])

    def __call__(self, s: State) -> Tensor:
        """Action [N, 4] in [-1, 1]."""
        qpos, ctrl, kind = s["qpos"], s["ctrl"], s["kind"]
        tool, fingers = qpos[:, :3], qpos[:, 3:5]
        way = self.task.way(qpos, s["combination"], s["spot"])
        a, b = tool + way[:, 3], tool + way[:, 4]
        # Two blocks in one zone stand side by side along x: the fingers close along y.
        aside = torch.cat((0.5 * APART * self._gather[kind], torch.zeros_like(a[:, :2])), dim=1)
        to_a, to_b = a + way[:, 0] + aside, b + way[:, 1] - aside
        left_a = (fingers.amin(1, keepdim=True) > HALF + 0.008) | (
            way[:, 3].square().sum(1, keepdim=True) > 0.045**2
        )
        second = self._both[kind] & _at(a, to_a) & left_a
        block, goal = torch.where(second, b, a), torch.where(second, to_b, to_a)
        grasp = self._grasp(tool, ctrl, block, goal, self._keep[kind])
        push = self._shove(tool, ctrl, block, goal)
        reach = self._reach(tool, ctrl, tool + way[:, 0], self._touch[kind])
        return torch.where(self._tool[kind], reach, torch.where(self._push[kind], push, grasp))

    def _reach(self, tool: Tensor, ctrl: Tensor, goal: Tensor, touch: Tensor) -> Tensor:
        """Over the goal, then down; fingers as they are.

        All [N, ..]; ``touch`` bool [N, 1]: down to the table.
        """
        near = _flat(goal - tool) < 0.02
        low = torch.where(touch, LOW[2], goal[:, 2:] + 0.01)
        z = torch.where(near, low, TRAVEL)
        return _act(ctrl, torch.cat((goal[:, :2], z), dim=1), torch.zeros_like(z))

    def _grasp(
        self, tool: Tensor, ctrl: Tensor, block: Tensor, goal: Tensor, keep: Tensor
    ) -> Tensor:
        """Open over the block, down, close, up, across, down, open.

        All [N, ..]; bool ``keep``: do not let go.
        """
        finger = ctrl[:, 3:4]
        off, left = tool - block, goal - block
        around = (_flat(off) < 0.012) & (off[:, 2:].abs() < 0.008)
        held = (finger < 0.005) & (_flat(off) < 0.018) & (off[:, 2:].abs() < 0.02)
        done = _at(block, goal) & ~keep
        low = tool[:, 2:] < 0.105

        # Approach: across at TRAVEL, down where straight above with open fingers.
        above = (_flat(off) < torch.where(low, 0.012, 0.006)) & (finger > OPEN - 0.005)
        stay = torch.where(low & ~above, tool[:, :2], block[:, :2])
        approach = torch.cat((stay, torch.where(above, block[:, 2:], TRAVEL)), dim=1)
        # Carry: up, across, down.
        there = _flat(left) < 0.01
        across = torch.where(low & (_flat(left) > 0.03), tool[:, :2], tool[:, :2] + left[:, :2])
        height = torch.where(there, goal[:, 2:] + off[:, 2:], TRAVEL)
        carry = torch.cat((across, height), dim=1)

        target = torch.where(done | (around & ~held), tool, torch.where(held, carry, approach))
        close = torch.where((around | held) & ~done, -1.0, 1.0)
        return _act(ctrl, target, close.to(tool))

    def _shove(self, tool: Tensor, ctrl: Tensor, block: Tensor, goal: Tensor) -> Tensor:
        """Behind the block, down, forward with closed fingers: first along x, then along y.

        All [N, ..].
        """
        off, left = (tool - block)[:, :2], (goal - block)[:, :2]
        low = tool[:, 2:] < 0.035
        beside_y = low & (off[:, 1:].abs() > off[:, :1].abs())  # it pushes along y already
        along_x = left[:, :1].abs() > torch.where(beside_y, 0.03, 0.01)
        ahead = (
            torch.cat((along_x, ~along_x), dim=1) * left.sign()
        )  # [N, 2] a unit vector along an axis
        along = (off * ahead).sum(1, keepdim=True)
        across = (off - along * ahead).abs().sum(1, keepdim=True)
        pushing = low & (along < -0.032) & (across < 0.013)
        # Forward, with the block's centre straight ahead.
        forward = torch.where(ahead != 0, tool[:, :2] + STEP * PUSH_STEP * ahead, block[:, :2])
        # Else away from the block, up, across at HOP, down.
        start = block[:, :2] - BEHIND * ahead
        over = _flat(tool[:, :2] - start) < 0.012
        touching = (tool[:, 2:] < 0.06) & (_flat(off) < BEHIND - 0.012)
        away = tool[:, :2] + STEP * off / _flat(off).clamp_min(1e-6)
        around = torch.where(
            touching, away, torch.where((tool[:, 2:] > HOP - 0.012) | over, start, tool[:, :2])
        )
        height = torch.where(
            pushing | over, LOW[2] + 0.002, torch.where(touching, tool[:, 2:], HOP)
        )
        xy = torch.where(pushing, forward, around)
        return _act(ctrl, torch.cat((xy, height), dim=1), -torch.ones_like(height))


def _flat(x: Tensor) -> Tensor:
    """[N, 2 or more] -> [N, 1], length of its x and y."""
    return x[:, :2].square().sum(1, keepdim=True).sqrt()


def _at(block: Tensor, goal: Tensor) -> Tensor:
    """bool [N, 1], the block lies at its goal."""
    return (_flat(block - goal) < 0.015) & ((block - goal)[:, 2:].abs() < 0.006)


def _act(ctrl: Tensor, target: Tensor, finger: Tensor) -> Tensor:
    """The action that takes the targets towards ``target`` [N, 3], and the fingers by ``finger``
    [N, 1].
    """
    return torch.cat(((target - ctrl[:, :3]) / STEP, finger), dim=1).clamp(-1.0, 1.0)
