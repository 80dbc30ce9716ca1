"""Responses that one update begins and a later one completes.

An update generates responses to more prompts than its batch has, and ends when enough of them are
complete, so that it does not wait for the longest. The others go on in the next update with the
newest weights. Each token keeps its log-probability and the version of the policy that chose it,
for ``off_policy_correction``.

Source: Kimi k1.5 (2501.12599), partial rollouts. There an update ends after a number of tokens,
here after a number of groups, because batches have a fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.types import Say
from embodied_ppo.rollout.generation.engine import Generation


@dataclass(frozen=True)
class Responses:
    """N responses; those of a group are adjacent.

    Attributes:
        prompt: int64 [N], index of the prompt of each.
        generation: Their tokens so far.
        version: int64 [N, T], version of the policy that chose each token.
    """

    prompt: Tensor
    generation: Generation
    version: Tensor


class PartialResponses:
    """Unfinished groups of one process, which its next update continues."""

    def __init__(self, groups: int, extra: int, group_size: int, kind: Mapping[str, int]) -> None:
        """Create it without unfinished groups.

        Args:
            groups: Groups of a batch, of this process.
            extra: Groups that are generated in addition.
            group_size: Responses of a group.
            kind: Values that a state to continue must have, too.
        """
        self.groups, self.extra, self.group_size = groups, extra, group_size
        self.kind = {**kind, "group_size": group_size}
        self.unfinished: Responses | None = None

    @property
    def prompts(self) -> list[int]:
        """Prompt of each unfinished group."""
        if self.unfinished is None:
            return []
        return self.unfinished.prompt[:: self.group_size].tolist()

    @property
    def missing(self) -> int:
        """Number of groups that the next update begins; the same in all processes."""
        return max(0, self.groups + self.extra - len(self.prompts))

    def enough(self, total: int, incomplete: Sequence[int]) -> bool:
        """Return whether a batch is complete while these of ``total`` responses are incomplete."""
        unfinished = {row // self.group_size for row in incomplete}
        return total // self.group_size - len(unfinished) >= self.groups

    def versions(self, generation: Generation, version: int) -> Tensor:
        """Return ``Responses.version``; the unfinished groups were the first of ``generation``."""
        versions = torch.full_like(generation.token, version)
        if (begun := self.unfinished) is not None:
            steps = torch.arange(versions.shape[1])
            earlier = steps < begun.generation.length.unsqueeze(1)  # [N, T]
            versions[: len(earlier)] = begun.version.where(earlier, version).to(versions.device)
        return versions

    def take(self, responses: Responses) -> Responses:
        """Return the first ``groups`` complete groups, and keep the others."""
        if not self.extra:
            return responses
        generation, size = responses.generation, self.group_size
        ended = generation.stopped | (generation.length >= generation.token.shape[1])
        complete = ended.view(-1, size).all(1).cpu()  # [G]
        batch = (complete & (complete.cumsum(0) <= self.groups)).repeat_interleave(size)
        # They wait in host memory, because training needs that of the device.
        self.unfinished = tree.map(lambda x: x[~batch].cpu(), responses)
        return tree.index(responses, batch)

    def state(self) -> dict[str, Any] | None:
        """Return the unfinished groups."""
        if (begun := self.unfinished) is None:
            return None
        return {**self.kind, "responses": asdict(begun)}

    def load_state(self, state: Mapping[str, Any] | None, say: Say) -> None:
        """Continue from ``state()``, or say that its responses are dropped."""
        self.unfinished = None
        if state is None:
            return
        changed = [name for name, value in self.kind.items() if state[name] != value]
        # Without additional groups, a group filter or another engine may make the batch.
        if changed := changed or ["rollout.oversampling"] * (not self.extra):
            say(f"resume: {', '.join(changed)} changed; unfinished responses are dropped")
            return
        generation = Generation(**state["responses"]["generation"])
        self.unfinished = Responses(**{**state["responses"], "generation": generation})
