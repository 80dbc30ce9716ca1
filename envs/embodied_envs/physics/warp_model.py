"""What mujoco_warp needs besides a model: a device, the options that it has, and capacities."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import mujoco
import torch
import warp as wp

from embodied_envs.base.errors import EnvError


def resolve_devices(device: torch.device | str) -> tuple[torch.device, Any]:
    """Return torch's device, with its index, and warp's.

    Raises:
        EnvError: The device is neither "cpu" nor "cuda", or warp cannot use its driver.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise EnvError(f"mujoco_warp runs on cuda (or cpu), not on {device}; use simulator=mujoco")
    wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)  # not a line for each kernel
    wp.init()
    if device.type == "cuda":
        if not wp.is_cuda_available():
            raise EnvError("use simulator=mujoco: warp needs a CUDA driver of version 580 or newer")
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    return device, wp.device_from_torch(device)


def adapt_model(model: mujoco.MjModel) -> mujoco.MjModel:
    """Return a copy of ``model`` with the options that mujoco_warp has.

    Raises:
        EnvError: The model has features with an internal state that a reset would not clear, or
            contacts that ``warp_order`` cannot sort.
    """
    model = copy.copy(model)
    for has_feature, feature in (
        (model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP), "flag sleep"),
        (getattr(model, "nhistory", 0), "actuators and sensors with a delay"),
        (torch.are_deterministic_algorithms_enabled() and model.nflex, "deterministic flexes"),
    ):
        if has_feature:
            raise EnvError(f"use simulator=mujoco: {feature} are not supported on a GPU")
    # mujoco_warp has neither feature.
    bits = (mujoco.mjtDisableBit.mjDSBL_AUTORESET, mujoco.mjtDisableBit.mjDSBL_MIDPHASE)
    model.opt.disableflags &= ~sum(int(b) for b in bits)
    if int(model.opt.solver) == int(mujoco.mjtSolver.mjSOL_PGS):
        warnings.warn(
            "mujoco_warp has no PGS solver: the model is simulated with Newton's", stacklevel=2
        )
        model.opt.solver = int(mujoco.mjtSolver.mjSOL_NEWTON)
    return model


def default_capacities(model: mujoco.MjModel) -> tuple[int, int]:
    """Return (nconmax, njmax) estimated from the shapes of the model.

    Each moving shape rests on the ground and touches one other shape: a sphere touches in 1 point,
    a capsule in 2, another shape in 4; a height field every shape in 4 more. The number of contacts
    is clamped to [16, 256]; each has 2·(dimensions - 1) rows.
    """
    points = {int(mujoco.mjtGeom.mjGEOM_SPHERE): 1, int(mujoco.mjtGeom.mjGEOM_CAPSULE): 2}
    solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    solid[model.pair_geom1] = solid[model.pair_geom2] = True
    moving = solid & (model.body_weldid[model.geom_bodyid] != 0)
    extra = 4 * bool((model.geom_type[solid] == int(mujoco.mjtGeom.mjGEOM_HFIELD)).any())
    contacts = sum(points.get(int(kind), 4) + 1 + extra for kind in model.geom_type[moving])
    contacts = min(max(contacts, 16), 256)
    dimensions = max(model.geom_condim[solid].max(initial=1), model.pair_dim.max(initial=1))
    per_contact = max(1, 2 * (int(dimensions) - 1))
    limits = int(model.jnt_limited.sum() + model.tendon_limited.sum())
    friction = int((model.dof_frictionloss > 0).sum() + (model.tendon_frictionloss > 0).sum())
    return contacts, 6 * model.neq + friction + limits + contacts * per_contact


def capacity_message(option: str, limit: int, quantity: str, peak: int) -> str:
    """Return the error message with the value to set.

    ``peak`` counts the last substep of each step; the overflow can have occurred in another one.
    """
    needed = math.ceil(1.25 * peak) if peak > limit else 2 * limit
    return (
        f"env.kwargs.{option}={limit} is too small for the {quantity} (at most {peak} seen); set"
        f" {needed} or more"
    )
