"""One optimiser step as compiled code, or on a GPU as a CUDA graph. Optional: skip it at first.

``MinibatchStep`` is ``optimizer.MinibatchOptimizer.step`` as a function of tensors only, so that
torch can compile it; ``CompiledStep`` decides when it runs and calls it. Results equal those of the
eager step to float32 rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core import compile
from embodied_ppo.core.cuda_graph import Example
from embodied_ppo.core.types import Samples
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.minibatches import MinibatchLoss, take
from embodied_ppo.ppo.paired_steps import take_steps

# Scalars of AdamW that change per minibatch; coefficients of the loss follow in the vector.
ADAMW_SETTINGS: tuple[str, ...] = (
    *("actor_step", "critic_step", "actor_inv", "critic_inv", "actor_decay", "critic_decay"),
)

# Options that ``MinibatchStep`` can read; runs that differ in others share a compiled library.
STEP_OPTIONS: tuple[str, ...] = (
    *("adam_betas", "adam_eps", "clip_ratio_c", "clip_ratio_high"),
    *("clip_ratio_low", "entropy_type", "huber_delta", "kl_loss_coef", "kl_loss_type"),
    *("logprob_type", "loss_agg_func", "max_grad_norm", "minibatch_unit", "policy_loss"),
    *("positive_nll_weight", "ratio_level", "symmetry", "symmetry_coef"),
    *("value_clip", "value_loss_coef"),
)
# Statistics of the value function; others are those of the policy.
CRITIC_STATISTICS = ("value_loss", "value_clipped", "value_difference", "critic_norm")
# Statistics of a step in addition to those of its loss.
STEP_STATISTICS = ("loss", "rows", "actor_norm", "critic_norm", "finite")


# -------------------------------------------------------------------------------------------- AdamW
@dataclass(frozen=True)
class AdamState:
    """All parameters, those of the actor first, with their moments and their numbers of steps."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, first moments, second moments."""
        return [*self.parameters, *self.first, *self.second]


def adam_state(optimizer: torch.optim.Optimizer) -> AdamState:
    """Return the optimiser's state; create it before the first step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # The same entries as torch creates, so that eager and compiled steps continue one state.
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    state = [optimizer.state[p] for p in parameters]
    lists = ([s[key] for s in state] for key in ("exp_avg", "exp_avg_sq", "step"))
    # Detached tensors share the memory of the parameters, which the programs overwrite.
    return AdamState([p.detach() for p in parameters], *lists)


def adamw_settings(
    config: AlgorithmConfig,
    n: int,
    *,
    lr: Sequence[float],
    steps: Sequence[int],
    coefficients: Sequence[float] = (),
) -> Tensor:
    """Return rows of settings, float32 [n, 6 + K], for the next n steps of AdamW.

    AdamW (Loshchilov & Hutter 2019, alg. 2): step = lr/(1 − β1^t), inv = 1/sqrt(1 − β2^t), decay =
    lr·weight_decay.

    Args:
        lr: Learning rates of actor and critic.
        steps: Optimiser steps that actor and critic have taken, t of the first row is one more.
        coefficients: K coefficients of the loss.
    """
    # In float64, because 1 − β2^t loses digits by cancellation in the first steps.
    t = torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(1) + torch.tensor(
        steps, dtype=torch.float64
    )  # [n, 2]
    rate = torch.tensor(lr, dtype=torch.float64).expand(n, 2)
    columns = (
        rate / (1 - config.adam_betas[0] ** t),
        (1 - config.adam_betas[1] ** t).rsqrt(),
        rate * config.weight_decay,
        torch.tensor(coefficients, dtype=torch.float64).expand(n, -1),
    )
    return torch.cat(columns, dim=1).float()


def adamw_step(
    p: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    c: AlgorithmConfig,
    *,
    step: Tensor,
    inv: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a parameter and its moments after one step of AdamW.

    m ← β1·m + (1 − β1)·g ; v ← β2·v + (1 − β2)·g² ; p ← p·(1 − decay) − step·m / (sqrt(v)·inv + ε)

    Source: Loshchilov & Hutter 2019, alg. 2. ``step``, ``inv`` and ``decay`` are those of
    ``adamw_settings``.

    The eager step uses ``torch.optim.AdamW(fused=True)`` instead. That kernel divides in another
    order, so that parameters differ in the last bit after the first step, and on a CPU it takes
    about a third of the time of these operations one by one. torch cannot compile the kernel into
    the library of the minibatch, where these operations are fused.
    """
    # lerp computes m + (1 − β1)·(g − m), which equals β1·m + (1 − β1)·g.
    beta1, beta2 = c.adam_betas
    first = torch.lerp(first, grad, 1 - beta1)
    second = second * beta2 + grad * grad * (1 - beta2)
    p = p * (1 - decay) - step * first / (second.sqrt() * inv + c.adam_eps)
    return p, first, second


def gradient_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.stack([g.square().sum() for g in grads]).sum().sqrt()


# ------------------------------------------------------------------------------ the tensor programs
class MinibatchStep:
    """Gather, forward, loss, backward, clipping and AdamW of one minibatch, on tensors only.

    Parameters and moments change in place. Nothing changes where a loss or gradient norm is not
    finite, or where the whole minibatch is masked. No value is read on the host, so that the step
    can be compiled or captured as one CUDA graph.
    """

    def __init__(
        self,
        loss: MinibatchLoss,
        actor: Sequence[str],
        critic: Sequence[str],
        batch: Samples,
        buffers: Sequence[str] = (),
    ) -> None:
        """Create the function.

        Args:
            loss: The loss; a copy of it is kept.
            actor: Names of the actor's parameters in ``loss.model``.
            critic: Names of the critic's parameters.
            batch: A whole rollout; only its structure is kept.
            buffers: Names of the buffers of ``loss.model`` that the loss reads.
        """
        self.loss: Any = copy.copy(loss)
        # The cache key of a library contains these options, so no others may be here.
        self.loss.config = SimpleNamespace(**{x: getattr(loss.config, x) for x in STEP_OPTIONS})
        # Values are arguments: a library must not depend on them.
        self.loss.coefficients = dict.fromkeys(loss.coefficients, 0.0)
        # All minibatches are one program, in which the comparison costs next to nothing.
        self.loss.compares = True
        # The model is an attribute of the loss, which is called as one module.
        self.names, self.actors = [f"model.{n}" for n in (*actor, *critic)], len(actor)
        self.buffers = [f"model.{n}" for n in buffers]
        # The program is pickled for the compiler, so it must not contain the rollout.
        self.batch = tree.map(lambda x: x.new_empty(0), batch)

    def __call__(self, *tensors: Tensor) -> Any:
        """Take one step and return its statistics, float32 [K]: ``loss.names``, STEP_STATISTICS.

        The last one, "finite", is not finite if the loss or a gradient is not finite.

        Args:
            tensors: Parameters, first moments, second moments, settings, index [B], buffers, leaves
                of the rollout.
        """
        n = len(self.names)
        settings, index = tensors[3 * n], tensors[3 * n + 1]
        coefficients = settings.unbind()[len(ADAMW_SETTINGS) :]
        loss, stats, live = self.evaluate(tensors[:n], coefficients, index, tensors[3 * n + 2 :])
        return self._apply(tensors[: 3 * n], settings, torch.autograd.grad(loss, live), stats)

    def evaluate(
        self,
        params: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        index: Tensor,
        rest: Sequence[Tensor],
        **part: str,
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """Return the loss of a minibatch, its statistics, and the leaves of its gradients.

        Args:
            params: Parameters.
            coefficients: Coefficients of the loss.
            index: Samples [B].
            rest: Buffers, leaves of the rollout.
            part: Argument of the loss of that name.
        """
        unit = self.loss.config.minibatch_unit
        # Name the tensors again: buffers of the model, coefficients, fields of the batch.
        others = iter(rest)
        buffers = [next(others) for _ in self.buffers]
        batch: Samples = tree.map(lambda _: next(others), self.batch)
        objective = copy.copy(self.loss)
        objective.coefficients = dict(zip(self.loss.coefficients, coefficients, strict=True))
        minibatch = take(batch, index, unit)
        aggregation = self.loss.config.loss_agg_func
        rows, columns = losses.minibatch_counts(minibatch.mask, unit, aggregation)
        minibatch = replace(minibatch, rows=rows, columns=columns)
        # Differentiate with respect to new leaves, because the arguments require no gradient.
        live = [p.detach().requires_grad_() for p in params]
        loss, stats = torch.func.functional_call(
            objective,
            dict(zip([*self.names, *self.buffers], [*live, *buffers], strict=True)),
            (minibatch,),
            part,
        )
        return loss, stats | {"loss": loss.detach(), "rows": minibatch.mask.sum()}, live

    @torch.no_grad()
    def _apply(
        self,
        state: Sequence[Tensor],
        settings: Tensor,
        grads: Sequence[Tensor],
        stats: Mapping[str, Tensor],
    ) -> Tensor:
        """Clip the gradients, take a step of AdamW and return statistics [K].

        Args:
            state: Parameters, first moments and second moments, which change.
            settings: Row of ``adamw_settings``.
            grads: Gradients of the parameters.
            stats: Statistics of the loss.
        """
        c, n = self.loss.config, len(self.names)
        params, first, second = state[:n], state[n : 2 * n], state[2 * n :]
        s = dict(zip(ADAMW_SETTINGS, settings.unbind(), strict=False))
        # Norms of actor and critic are metrics; the clipping uses that of both together.
        groups = (grads[: self.actors], grads[self.actors :])
        actor, critic = (gradient_norm(x) if x else torch.zeros_like(stats["loss"]) for x in groups)
        norm = torch.hypot(actor, critic)
        finite = norm + stats["loss"]
        # A step with a gradient of 0 would still move the weights, by AdamW's momentum.
        valid = torch.isfinite(finite) & (stats["rows"] > 0)
        # g ← g · min(1, max_grad_norm / (|g| + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
        scale = 1.0 if c.max_grad_norm is None else (c.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for i, (p, m, v, grad) in enumerate(zip(params, first, second, grads, strict=True)):
            role = "actor" if i < self.actors else "critic"
            step, inv, decay = (s[f"{role}_{name}"] for name in ("step", "inv", "decay"))
            new = adamw_step(p, m, v, grad * scale, c, step=step, inv=inv, decay=decay)
            for old, x in zip((p, m, v), new, strict=True):
                # Select on the device: a CUDA graph cannot contain a branch of the host.
                old.copy_(torch.where(valid, x, old))
        stats = {**stats, "actor_norm": actor, "critic_norm": critic, "finite": finite}
        return torch.stack([stats[name].float() for name in (*self.loss.names, *STEP_STATISTICS)])


class Gradients(MinibatchStep):
    """Gradients and statistics of one of two networks that share no weight, of one minibatch."""

    def __init__(self, *parts: Any, part: str) -> None:
        """Create the function of the network ``part``; other arguments as for MinibatchStep."""
        super().__init__(*parts)
        self.part = part

    def __call__(self, *tensors: Tensor) -> Any:
        """Return statistics, float32 [K], which are 0 for the other network, and the gradients.

        Args:
            tensors: Parameters of both networks, coefficients of the loss, index [B], buffers,
                leaves of the rollout.
        """
        n, is_actor = len(self.names), self.part == "actor"
        coefficients, index = tensors[n].unbind(), tensors[n + 1]
        loss, stats, live = self.evaluate(
            tensors[:n], coefficients, index, tensors[n + 2 :], part=self.part
        )
        own = live[: self.actors] if is_actor else live[self.actors :]
        grads = torch.autograd.grad(loss, own)
        with torch.no_grad():
            names, zero = (*self.loss.names, *STEP_STATISTICS), torch.zeros_like(stats["loss"])
            stats = stats | {f"{self.part}_norm": gradient_norm(grads)}
            kept = {x for x in names if x == "loss" or (x in CRITIC_STATISTICS) != is_actor}
            row = [stats[x].float() if x in kept and x in stats else zero for x in names]
            return torch.stack(row), *(g.contiguous() for g in grads)


# ------------------------------------------------------------------------------------- the schedule
class CompiledStep:
    """Runs minibatches as compiled code from the update that a schedule names."""

    def __init__(self, schedule: compile.CompileSchedule) -> None:
        self.schedule = schedule

    def begin(
        self,
        loss: MinibatchLoss,
        adamw: torch.optim.Optimizer,
        batch: Samples,
        *,
        update: int,
        size: int,
        count: int,
        buffers: Sequence[str],
        critic_only: bool,
    ) -> bool:
        """Prepare the steps of an update; return whether they run as compiled code.

        Starts the compilation when it is due.

        Args:
            loss: The loss.
            adamw: Has two groups of parameters, those of actor and critic.
            batch: The rollout.
            update: Number of the update.
            size: Rows (columns) of a minibatch.
            count: Minibatches of the update at most.
            buffers: Names of the buffers of ``loss.model`` that the loss reads.
            critic_only: Whether the actor does not change; such updates are not compiled.
        """
        device, constants = batch.mask.device, _constants(loss, batch, buffers)
        is_pair = device.type == "cpu" and loss.separate
        # A program receives parameters by position and replaces them by name.
        name = {id(p): n for n, p in loss.model.named_parameters()}
        actor, critic = ([name[id(p)] for p in group["params"]] for group in adamw.param_groups)

        # Called only where a compilation starts, because ``adam_state`` allocates all moments, and
        # an eager step only those of its parameters.
        def example() -> Example:
            state, index = adam_state(adamw), torch.arange(size, device=device)
            coefficients = torch.zeros(len(loss.coefficients), device=device)
            if is_pair:
                programs = [
                    Gradients(loss, actor, critic, batch, buffers, part=part)
                    for part in ("actor", "critic")
                ]
                return Example(programs, state.parameters, [coefficients, index, *constants])
            settings = torch.cat([coefficients.new_zeros(len(ADAMW_SETTINGS)), coefficients])
            program = MinibatchStep(loss, actor, critic, batch, buffers)
            return Example(program, state.tensors, [settings, index, *constants])

        functions = self.schedule.get(update, example)
        # The program contains the complete loss; while only the critic learns, it is another one.
        if critic_only or functions is None:
            return False
        self._functions, self._state, self._constants = functions, adam_state(adamw), constants
        # The settings of all steps are known now, so that no step needs the host.
        self._settings = adamw_settings(
            loss.config,
            count,
            lr=[group["lr"] for group in adamw.param_groups],
            steps=[
                int(adamw.state[group["params"][0]]["step"]) if group["params"] else 0
                for group in adamw.param_groups
            ],
            coefficients=list(loss.coefficients.values()),
        ).to(device)
        self._taken = 0
        if is_pair:
            self._loss, self._actors = loss, len(actor)
            self._coefficients = self._settings[0, len(ADAMW_SETTINGS) :].clone()
            # The loop in C++ calls programs by their C interface, and changes float32 in order.
            return all(isinstance(f, compile.CFunction) for f in functions) and all(
                x.is_contiguous() and x.dtype == torch.float32 for x in self._state.tensors
            )
        return True

    def __call__(self, indices: Sequence[Tensor]) -> list[Tensor]:
        """Take the steps of minibatches, until one is not finite; CUDA graphs take all.

        Args:
            indices: Samples (or columns) of each minibatch.

        Returns:
            Their statistics, float32 [K] each.
        """
        settings, rows = self._settings[self._taken :], list[Tensor]()
        state, constants, functions = self._state, self._constants, self._functions
        if len(functions) == 2 and indices:
            table = take_steps(
                functions,
                state.tensors,
                self._actors,
                [*state.parameters, self._coefficients, indices[0], *constants],
                self._loss.config,
                settings,
                indices,
                columns=len(self._loss.names) + len(STEP_STATISTICS),
                threads=self.schedule.threads,
            )
            rows, indices = [*table.unbind()], []
        for setting, index in zip(settings.unbind(), indices, strict=False):
            (row,) = functions[0]([*state.tensors, setting, index, *constants])
            rows.append(row)
            # Reading the value would make a CUDA graph wait.
            if not self.schedule.captures and not math.isfinite(row[-1].item()):
                break
        self._taken += len(rows)
        return rows

    def end(self, steps: float) -> None:
        """Free the rollout; count the optimiser steps that were taken."""
        # The program reads its bias corrections from the settings and does not count steps.
        for count in self._state.steps:
            count += steps
        del self._constants


def _constants(loss: MinibatchLoss, batch: Samples, buffers: Sequence[str]) -> list[Tensor]:
    """Return the arguments that are the same in all minibatches of an update."""
    return [
        *(loss.model.get_buffer(name) for name in buffers),
        *(x.contiguous() for x in tree.leaves(batch)),
    ]
