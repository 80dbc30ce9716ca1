"""Scripted expert of Tabletop: a controller that reads the true state, for demonstrations."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_envs.tasks import tabletop
from embodied_envs.tasks.task import State

# Heights (m) of horizontal motions: with a block or over stacks, and over single blocks.
TRAVEL_HEIGHT, HOP_HEIGHT = 0.125, 0.08
# Distance (m) from the block's centre to the point where the tool descends to push it.
PUSH_START = 0.06
# Action while pushing, slow enough that the block stops with the gripper.
PUSH_ACTION = 0.55


class Expert:
    """Policy for every family of Tabletop: ``expert(env.s)`` returns an action [N, 4].

    It has no memory: the action of a world depends on its current state alone, so it recovers from
    disturbances.
    """

    def __init__(self, task: tabletop.Tabletop, device: torch.device | str = "cpu") -> None:
        """Read the rules of the task's families.

        Args:
            task: The bound task of the environment.
            device: Device of its worlds.
        """
        self.task = task
        rules = [tabletop.RULES[name] for name in task.names]

        def column(flags: list[bool]) -> Tensor:
            return torch.tensor(flags, device=device)[:, None]

        self._tool = column([rule.method == "tool" for rule in rules])
        self._push = column([rule.method == "push" for rule in rules])
        self._touch = column([name == "touch" for name in task.names])
        self._gather = column([name == "gather" for name in task.names])
        self._keep = column(["free" not in rule.bounds for rule in rules])
        self._both = column(["b_flat" in rule.bounds for rule in rules])

    def __call__(self, s: State) -> Tensor:
        """Return the action [N, 4] in [-1, 1] for the state ``s``."""
        qpos, ctrl, kind = s["qpos"], s["ctrl"], s["kind"]
        tool, fingers = qpos[:, :3], qpos[:, 3:5]
        d = self.task.displacements(qpos, s["combination"], s["spot"])
        a, b = tool + d[:, 3], tool + d[:, 4]
        # Two blocks in one zone stand side by side along x, because the fingers close along y.
        half = 0.5 * tabletop.BLOCK_DISTANCE * self._gather[kind]
        aside = torch.cat((half, torch.zeros_like(a[:, :2])), dim=1)
        goal_a, goal_b = a + d[:, 0] + aside, b + d[:, 1] - aside
        is_open = fingers.amin(1, keepdim=True) > tabletop.HALF_EDGE + 0.008
        released_a = is_open | (d[:, 3].square().sum(1, keepdim=True) > 0.045**2)
        move_b = self._both[kind] & _is_at(a, goal_a) & released_a
        block, goal = torch.where(move_b, b, a), torch.where(move_b, goal_b, goal_a)
        grasp = self._grasp_action(tool, ctrl, block, goal, self._keep[kind])
        push = self._push_action(tool, ctrl, block, goal)
        reach = self._reach_action(tool, ctrl, tool + d[:, 0], self._touch[kind])
        return torch.where(self._tool[kind], reach, torch.where(self._push[kind], push, grasp))

    def _reach_action(self, tool: Tensor, ctrl: Tensor, goal: Tensor, touch: Tensor) -> Tensor:
        """Move over the goal, then down, to the table where ``touch`` bool [N, 1]."""
        near = _horizontal(goal - tool) < 0.02
        low = torch.where(touch, tabletop.LOW[2], goal[:, 2:] + 0.01)
        z = torch.where(near, low, TRAVEL_HEIGHT)
        return _action(ctrl, torch.cat((goal[:, :2], z), dim=1), torch.zeros_like(z))

    def _grasp_action(
        self, tool: Tensor, ctrl: Tensor, block: Tensor, goal: Tensor, keep: Tensor
    ) -> Tensor:
        """Open over the block, descend, close, lift, carry, lower; open unless ``keep``."""
        finger = ctrl[:, 3:4]
        offset, to_goal = tool - block, goal - block
        around = (_horizontal(offset) < 0.012) & (offset[:, 2:].abs() < 0.008)
        held = (finger < 0.005) & (_horizontal(offset) < 0.018) & (offset[:, 2:].abs() < 0.02)
        done = _is_at(block, goal) & ~keep
        low = tool[:, 2:] < 0.105

        # Approach: across at TRAVEL_HEIGHT, then down once straight above with open fingers.
        is_open = finger > tabletop.FINGER_OPEN - 0.005
        above = (_horizontal(offset) < torch.where(low, 0.012, 0.006)) & is_open
        xy = torch.where(low & ~above, tool[:, :2], block[:, :2])
        approach = torch.cat((xy, torch.where(above, block[:, 2:], TRAVEL_HEIGHT)), dim=1)
        # Carry: up, across, down.
        distance = _horizontal(to_goal)
        across = torch.where(low & (distance > 0.03), tool[:, :2], tool[:, :2] + to_goal[:, :2])
        height = torch.where(distance < 0.01, goal[:, 2:] + offset[:, 2:], TRAVEL_HEIGHT)
        carry = torch.cat((across, height), dim=1)

        target = torch.where(done | (around & ~held), tool, torch.where(held, carry, approach))
        close = torch.where((around | held) & ~done, -1.0, 1.0)
        return _action(ctrl, target, close.to(tool))

    def _push_action(self, tool: Tensor, ctrl: Tensor, block: Tensor, goal: Tensor) -> Tensor:
        """Descend behind the block and push with closed fingers, first along x, then along y."""
        offset, to_goal = (tool - block)[:, :2], (goal - block)[:, :2]
        low = tool[:, 2:] < 0.035
        # A larger threshold once the push along y has begun prevents a switch back.
        pushes_y = low & (offset[:, 1:].abs() > offset[:, :1].abs())
        along_x = to_goal[:, :1].abs() > torch.where(pushes_y, 0.03, 0.01)
        ahead = torch.cat((along_x, ~along_x), dim=1) * to_goal.sign()  # [N, 2] unit vector
        along = (offset * ahead).sum(1, keepdim=True)
        across = (offset - along * ahead).abs().sum(1, keepdim=True)
        pushing = low & (along < -0.032) & (across < 0.013)
        # Push: forward, with the block's centre straight ahead.
        forward = torch.where(
            ahead != 0, tool[:, :2] + tabletop.STEP * PUSH_ACTION * ahead, block[:, :2]
        )
        # Otherwise: away from the block, up, across at HOP_HEIGHT, down.
        start = block[:, :2] - PUSH_START * ahead
        over = _horizontal(tool[:, :2] - start) < 0.012
        touching = (tool[:, 2:] < 0.06) & (_horizontal(offset) < PUSH_START - 0.012)
        away = tool[:, :2] + tabletop.STEP * offset / _horizontal(offset).clamp_min(1e-6)
        free = (tool[:, 2:] > HOP_HEIGHT - 0.012) | over
        around = torch.where(touching, away, torch.where(free, start, tool[:, :2]))
        raised = torch.where(touching, tool[:, 2:], HOP_HEIGHT)
        height = torch.where(pushing | over, tabletop.LOW[2] + 0.002, raised)
        xy = torch.where(pushing, forward, around)
        return _action(ctrl, torch.cat((xy, height), dim=1), -torch.ones_like(height))


def _horizontal(x: Tensor) -> Tensor:
    """Return the horizontal length [N, 1] of vectors [N, 2 or more]."""
    return x[:, :2].square().sum(1, keepdim=True).sqrt()


def _is_at(block: Tensor, goal: Tensor) -> Tensor:
    """Return bool [N, 1], whether the block is at its goal."""
    return (_horizontal(block - goal) < 0.015) & ((block - goal)[:, 2:].abs() < 0.006)


def _action(ctrl: Tensor, target: Tensor, finger: Tensor) -> Tensor:
    """Return the action towards the tool target [N, 3] that moves the fingers by [N, 1]."""
    return torch.cat(((target - ctrl[:, :3]) / tabletop.STEP, finger), dim=1).clamp(-1.0, 1.0)
