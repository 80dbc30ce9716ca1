"""Mirror images of a rollout's samples (``algorithm.symmetry``).

The image of a sample (s, a) is (M s, M a), where M exchanges left and right; advantage and return
are those of the original (Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric
Robot Policies"). Raw observations are mirrored and then encoded. The log-probabilities of the
images are computed under the policy before the update, so that all ratios begin at 1.

M a is distributed as π(a|s), not as π(M a|M s). The truncated importance weight min(1, π(M a|M s) /
π(a|s)) corrects for that. Without it an image that has become unlikely is pushed away with the full
gradient where its advantage is negative, and the asymmetry of a policy grows without bound.

T steps, N columns, S numbers of a policy's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.types import Obs
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.history import PREVIOUS_ACTIONS, named
from embodied_ppo.core.mirror import Mirror, SignedPermutation
from embodied_ppo.core.recurrent_state import MEMORY, START, memory_size
from embodied_ppo.core.types import MirroredSamples, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo import losses


class Symmetry:
    """Mirrors rollouts.

    The image of an episode has a memory of its own: it starts with the episode and continues from
    one rollout to the next, so that a checkpoint contains it.
    """

    def __init__(
        self, mirror: Mirror, *, size: int, columns: int, memory: int, device: torch.device
    ) -> None:
        """Create it before the first rollout.

        Args:
            mirror: Of the task.
            size: Numbers of an action of the policy, which may be a chunk of several.
            columns: N of all ranks together.
            memory: Numbers of the policy's memory, S; 0 without one.
            device: Device of the policy.
        """
        self.observations, self.action = mirror.observations, repeated(mirror.action, size)
        # float32 [N, S], after the images of all steps so far.
        self.memory = torch.zeros(columns, memory, device=device)

    def observe(self, obs: Obs) -> Obs:
        """Return the images of observations [.., D], or of their histories [.., K, D].

        Memory and marks of first steps pass unchanged.
        """
        if isinstance(obs, Tensor):
            return self.observations[next(iter(named(obs)))](obs)
        images = {**self.observations, PREVIOUS_ACTIONS: self.action}
        return {n: x if n in (MEMORY, START) else images[n](x) for n, x in obs.items()}

    def with_images(self, t: Trajectory) -> Trajectory:
        """Return a trajectory whose observations and mask [T, 2N, ..] are followed by images."""
        obs = tree.concatenate([t.obs, self.observe(t.obs)], 1)
        return replace(t, obs=obs, mask=torch.cat([t.mask, t.mask], 1))

    @torch.no_grad()
    def samples(
        self, actor: Any, t: Trajectory, c: AlgorithmConfig, ranks: Ranks
    ) -> MirroredSamples:
        """Return the mirror images of a rollout, [T, N, ..].

        Args:
            actor: A ``RobotActor``, with the weights before the update.
            t: This rank's columns.
            c: Options of the algorithm.
            ranks: Ranks that learn together.
        """
        obs, policy = self.observe(t.obs), actor.policy
        if memory_size(policy):
            # A sequence is evaluated from the state before its first row.
            assert isinstance(obs, dict)
            obs[MEMORY] = torch.zeros_like(obs[MEMORY])
            obs[MEMORY][0] = ranks.local_columns(self.memory[None])[0]
        replay = {name: self.action(x) for name, x in t.replay.items()}
        image = replace(t, obs=obs, action=self.action(t.action), replay=replay, kept=None)
        inputs = actor.encode(image)
        view = actor.view(policy, inputs, image)
        if memory_size(policy):
            self.memory = ranks.all_gather_columns(policy.memory_after(inputs)[None])[0]
        log_prob, acted = (
            losses.reduce_log_prob(x, c.logprob_type, batch_dims=2)
            for x in (view.log_prob, t.log_prob)
        )
        return MirroredSamples(
            inputs=inputs,
            action=image.action,
            replay=replay,
            log_prob=log_prob,
            weight=losses.off_policy_weight(log_prob, acted, t.mask, kind="token", cap=1.0),
            value=view.value,
        )

    def state(self) -> dict[str, Tensor]:
        """Return what the next rollout depends on."""
        return {"memory": self.memory.clone()}

    def load_state(self, state: Mapping[str, Tensor] | None) -> None:
        """Restore the result of ``state``; None: the run began without symmetry."""
        if state is not None:
            self.memory = state["memory"].to(self.memory)


def repeated(mirror: SignedPermutation, size: int) -> SignedPermutation:
    """Return the image of a chunk of actions with ``size`` numbers in all."""
    step = len(mirror.index)
    index = [i + first for first in range(0, size, step) for i in mirror.index]
    return SignedPermutation(tuple(index), mirror.sign * (size // step))
