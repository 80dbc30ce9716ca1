"""Distribution of several choices and numbers in one action (``embodied_envs.types.Composite``).

The D choices are categorical and the A numbers Gaussian (N) or of a beta distribution, all
independent given the observation:

    log pi(a) = sum_d log p_d(a_d) + sum_i log N(a_i; mean_i, std_i^2)
    H = sum_d H(p_d) + sum_i H(N_i)

Entries of log-probabilities and entropies are in the order of the action's columns.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from embodied_ppo.policies import distributions as dist


class CompositeActions(nn.Module):
    """Functions of the parameters of B distributions.

    Parameters are [B, S + A]: the logits of all choices, S in total, then the means. ``log_std`` is
    [A] or [B, A]. A beta distribution has alpha and beta instead of mean and log_std.
    """

    index: Tensor

    def __init__(self, choices: tuple[int, ...], numbers: int, family: dist.Numbers) -> None:
        """Describe the action: ``choices`` are the values of D choices, ``numbers`` is A."""
        super().__init__()
        self.family = family
        self.d, self.s, self.numbers = len(choices), sum(choices), numbers
        # [D, K]: position of each choice's logits; S stands for a value that it does not have.
        index = torch.full((len(choices), max(choices)), self.s)
        first = 0
        for row, n in zip(index, choices, strict=True):
            row[:n] = torch.arange(first, first + n)
            first += n
        self.register_buffer("index", index, persistent=False)

    def logits(self, parameters: Tensor) -> Tensor:
        """Return the logits of each choice, [B, S + A] -> [B, D, K]."""
        return self._by_choice(parameters, dist.IMPOSSIBLE)

    def _by_choice(self, x: Tensor, padding: float) -> Tensor:
        """Return the first S columns as [B, D, K], with ``padding`` where a choice has less."""
        padded = functional.pad(x[..., : self.s], (0, 1), value=padding)
        return padded.index_select(-1, self.index.flatten()).unflatten(-1, self.index.shape)

    def noise(self, rows: int, generator: Generator | None, device: torch.device) -> Tensor:
        """Return the random numbers of ``sample``, [rows, S + A]."""
        choices = dist.categorical_noise((rows, self.s), generator, device)
        return torch.cat([choices, self.family.noise((rows, self.numbers), generator, device)], 1)

    def sample(self, parameters: Tensor, log_std: Tensor, noise: Tensor | None) -> Tensor:
        """Return actions, float32 [B, D + A]; without ``noise`` the mode."""
        logits, mean = self.logits(parameters), parameters[..., self.s :]
        if noise is None:
            choice, numbers = logits.argmax(-1), self.family.mode(mean, log_std)
        else:
            choice, numbers = dist.categorical_sample(logits, self._by_choice(noise, 1.0)), mean
            if self.numbers:
                numbers = self.family.sample(mean, log_std, noise[..., self.s :])
        return torch.cat([choice.to(mean.dtype), numbers], dim=-1)

    def log_prob(self, action: Tensor, parameters: Tensor, log_std: Tensor) -> Tensor:
        """Return the log-probability of each column of actions [B, D + A], [B, D + A]."""
        log_prob = dist.categorical_log_prob(action[..., : self.d].long(), self.logits(parameters))
        if not self.numbers:
            return log_prob
        mean = parameters[..., self.s :]
        numbers = self.family.log_prob(action[..., self.d :], mean, log_std)
        return torch.cat([log_prob, numbers], dim=-1)

    def entropy(self, parameters: Tensor, log_std: Tensor) -> Tensor:
        """Return the entropy of each column, [B, D + A]."""
        entropy = dist.categorical_entropy(self.logits(parameters))
        if not self.numbers:
            return entropy
        numbers = self.family.entropy(parameters[..., self.s :], log_std)
        return torch.cat([entropy, numbers], dim=-1)
