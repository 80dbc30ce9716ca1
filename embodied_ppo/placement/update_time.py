"""Predict the seconds of an update on GPUs from counted operations; no GPU is needed.

    act       decisions x operations / (peak x ACT_SHARE), at least the time to read the weights
    learn     epochs x decisions x operations / (peak x LEARN_SHARE) + memory traffic of AdamW
    exchange  all-reduce of the gradients, all-gather of the shards
    simulate  environment steps / (steps per core and second x cores)

``memory_estimate.count_operations`` counts the operations. Peaks and bandwidths come from data
sheets. The shares of the peak are assumptions with a range, because no GPU was available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embodied_ppo.config.placement import Plan
from embodied_ppo.placement.memory_estimate import Operations

ACT_SHARE, LEARN_SHARE = (0.25, 0.40, 0.55), (0.25, 0.45, 0.60)
"""Share of the peak that acting and training reach: low, assumed, high."""
READ_SHARE = 0.7
"""Share of the memory bandwidth that AdamW and reading the weights reach."""
ADAMW_BYTES = 28
"""Bytes that AdamW moves per trained float32 parameter: it reads the weight, the gradient and two
moments (16 bytes), and writes the weight and the moments (12 bytes)."""
HOP_S = 20e-6
"""Latency of one step of a collective, seconds."""
SIMULATORS: Mapping[str, tuple[float, float, float]] = {"libero": (5.0, 10.0, 40.0)}
"""Simulator -> steps per second of one CPU core with rendering: low, measured, high.

LIBERO: about 10 with two images, rendered on a CPU core (``embodied_envs.adapters.libero_env``).
Rendering on a GPU may be faster; this was not measured.
"""
CORES = 16
"""CPU cores for each GPU."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: Name of the product.
        memory_gb: Memory, GB.
        tflops: Peak of dense bfloat16 matrix products with float32 accumulation, TFLOP/s.
        memory_gbs: Bandwidth of its memory, GB/s.
        link_gbs: Bandwidth to another GPU of the machine in one direction, GB/s.
    """

    name: str
    memory_gb: float
    tflops: float
    memory_gbs: float
    link_gbs: float


DEVICES = (
    Device("RTX 4090", 24, 165, 1008, 25),
    Device("A100 40GB", 40, 312, 1555, 300),
    Device("L40S", 48, 362, 864, 25),
    Device("H100 SXM", 80, 989, 3350, 450),
    Device("H200 SXM", 141, 989, 4800, 450),
)
"""Numbers of NVIDIA's data sheets. RTX 4090 and L40S have PCIe 4.0 x16, of which about 25 GB/s can
be used."""


def device_with(memory_gb: float) -> Device | None:
    """Return the first of DEVICES with this memory (within 2 %); None if there is none."""
    matches = [d for d in DEVICES if abs(d.memory_gb - memory_gb) <= 0.02 * d.memory_gb]
    return matches[0] if matches else None


@dataclass(frozen=True)
class Work:
    """Amount of work in an update.

    Attributes:
        decisions: Decisions of all environments, T x N.
        horizon: Decisions of each environment, T.
        chunk: Environment steps of a decision.
        epochs: Passes over the decisions.
        steps: Optimiser steps.
        micro_batches: Number of forward and backward passes of one learner.
        operations: Operations of one decision.
        weight_bytes: Bytes of the weights that one forward pass of acting reads.
        trained: Number of trained parameters.
        sharded_bytes: Bytes of the weights that a learner gathers for a pass; 0 without shards.
    """

    decisions: int
    horizon: int
    chunk: int
    epochs: int
    steps: int
    micro_batches: int
    operations: Operations
    weight_bytes: int
    trained: int
    sharded_bytes: int = 0


@dataclass(frozen=True)
class Seconds:
    """Seconds of an update and its phases.

    Attributes:
        simulate: Time of the simulators; None: their speed is not known.
        act: Time to sample actions.
        learn: Time of the training.
        exchange: Time of the communication between devices.
        low: Sum with the fast ends of the ranges, without ``simulate`` if that is None.
        high: Sum with the slow ends of the ranges, likewise.
    """

    simulate: float | None
    act: float
    learn: float
    exchange: float
    low: float
    high: float

    @property
    def total(self) -> float:
        """Sum of the phases."""
        return (self.simulate or 0.0) + self.act + self.learn + self.exchange


def predict(plan: Plan, work: Work, device: Device, simulator: str, cores: int = CORES) -> Seconds:
    """Predict the phases of an update whose phases run one after the other.

    Args:
        plan: Where the roles run.
        work: Work of the update.
        device: The GPU.
        simulator: Name of the simulator; its speed is known if it is a key of SIMULATORS.
        cores: CPU cores for each GPU.
    """
    rollouts, learners = plan.processes("rollout"), plan.processes("actor")
    ops, peak = work.operations, device.tflops * 1e12
    bandwidth = READ_SHARE * device.memory_gbs * 1e9
    acting_decisions, training_decisions = work.decisions / rollouts, work.decisions / learners
    reads_s = work.horizon * work.weight_bytes / bandwidth
    shards = learners if work.sharded_bytes else 1  # parts of the optimiser's state
    optimiser_s = work.steps * work.trained * ADAMW_BYTES / bandwidth / shards

    def act(share: float) -> float:
        return max(reads_s, acting_decisions * ops.act / (peak * share))

    def learn(share: float) -> float:
        once = training_decisions * ops.encode
        passes = work.epochs * training_decisions * ops.learn
        return (once + passes) / (peak * share) + optimiser_s

    exchange = _exchange_s(work, learners, device.link_gbs * 1e9)
    env_steps = work.decisions * work.chunk / (plan.processes("env") * cores)
    speeds = SIMULATORS.get(simulator)
    simulate = [0.0] * 3 if speeds is None else [env_steps / speed for speed in speeds]
    sums = [simulate[i] + act(ACT_SHARE[i]) + learn(LEARN_SHARE[i]) + exchange for i in range(3)]
    return Seconds(
        None if speeds is None else simulate[1],
        act(ACT_SHARE[1]),
        learn(LEARN_SHARE[1]),
        exchange,
        low=sums[2],
        high=sums[0],
    )


def _exchange_s(work: Work, learners: int, link: float) -> float:
    """Return the seconds of all-reduces and of gathering shards with the ring algorithm, W ranks.

    In an all-reduce each rank sends 2 (W - 1) / W of the data, in an all-gather (W - 1) / W. Shards
    are gathered in the forward pass and again in the backward pass.
    """
    if learners == 1:
        return 0.0
    part, hops = (learners - 1) / learners, 2 * (learners - 1) * HOP_S
    total = work.steps * (2 * part * 4 * work.trained / link + hops)
    if work.sharded_bytes:
        total += work.micro_batches * 2 * (part * work.sharded_bytes / link + hops)
    return total
