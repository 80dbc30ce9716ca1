"""Value outputs that are normalised for each task, and keep their values when statistics change.

Source: van Hasselt et al. 2016, "Learning values across many orders of magnitude", with an output
and statistics for each task as in Hessel et al. 2019, "Multi-task Deep Reinforcement Learning with
PopArt".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied_ppo.core.running_stats import Float64Buffers

TASK_INPUT = "/task"  # name of the model input that is the one-hot index of the task
SMALLEST_STD = 1e-2  # lower bound of σ: returns of a task without rewards are not amplified
# Lower bound of σ/|μ|, which keeps the rounding of V below the differences that n resolves.
SMALLEST_SHARE = 1e-3


class PopArt(Float64Buffers):
    """Mean μ_k and standard deviation σ_k of the returns of K tasks, float64 buffers [K].

    Output k of the value head is n_k; the value of a state of task k is V = σ_k·n_k + μ_k. A task
    whose index is unknown has V = 0.
    """

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, tasks: int, rate: float) -> None:
        """Start with μ = 0 and σ = 1.

        Args:
            tasks: K.
            rate: Weight β of the newest rollout in the moving averages.
        """
        super().__init__()
        self.tasks, self.rate = tasks, rate
        for name, value in (("mean", 0.0), ("square", 1.0), ("count", 0.0)):
            self.register_buffer(name, torch.full((tasks,), value, dtype=torch.float64))

    def std(self) -> Tensor:
        """Return σ, float64 [K]."""
        smallest = (SMALLEST_SHARE * self.mean.abs()).clamp(min=SMALLEST_STD)
        return (self.square - self.mean.square()).clamp(min=0.0).sqrt().maximum(smallest)

    def forward(self, outputs: Tensor, task: Tensor | None, *, normalized: bool) -> Tensor:
        """Return n (``normalized``) or V, [B], of outputs [B, K] and one-hot tasks [B, K].

        ``task``: None with one task.
        """
        if not normalized:
            outputs = outputs * self.std().float() + self.mean.float()
        return outputs.squeeze(-1) if task is None else (outputs * task).sum(-1)

    def normalize(self, x: Tensor, task: Tensor) -> Tensor:
        """Return (x − μ_k)/σ_k of values or returns [..] of tasks k, int64 [..]."""
        return ((x.double() - self.mean[task]) / self.std()[task]).float()

    def denormalize(self, x: Tensor, task: Tensor) -> Tensor:
        """Return σ_k·x + μ_k, the inverse of ``normalize``."""
        return (x.double() * self.std()[task] + self.mean[task]).float()

    @torch.no_grad()
    def update(self, head: nn.Linear, returns: Tensor, task: Tensor, mask: Tensor) -> None:
        """Merge the returns of a rollout and rescale the outputs, so that no V changes.

            μ' = (1 − β)·μ + β·mean(R),   q' = (1 − β)·q + β·mean(R²),   σ'² = q' − μ'²
            w ← w·σ/σ',   b ← (σ·b + μ − μ')/σ'

        β is 1/n in the n-th rollout of a task until that is smaller than ``rate``. A task without
        samples is unchanged.

        Args:
            head: The value head; its K outputs are rescaled.
            returns: R, [T, N].
            task: int64 [T, N].
            mask: bool [T, N].
        """
        member = torch.nn.functional.one_hot(task, self.tasks).double() * mask.unsqueeze(-1)
        x = returns.double().masked_fill(~mask, 0.0).unsqueeze(-1)  # [T, N, 1]
        number = member.sum((0, 1))  # [K]
        seen, old_mean, old_std = number > 0, self.mean.clone(), self.std()
        self.count += seen
        weight = torch.where(seen, (1.0 / self.count.clamp(min=1.0)).clamp(min=self.rate), 0.0)
        for average, power in ((self.mean, x), (self.square, x.square())):
            average.lerp_((member * power).sum((0, 1)) / number.clamp(min=1.0), weight)
        std = self.std()
        head.weight.copy_(head.weight * (old_std / std).unsqueeze(-1))
        head.bias.copy_((old_std * head.bias + old_mean - self.mean) / std)
