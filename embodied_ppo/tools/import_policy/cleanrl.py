"""Policies of CleanRL: the .cleanrl_model of ppo_continuous_action.py or ppo.py (torch.save of
``agent.state_dict()``).

Layout: critic.<i>, actor_mean.<i> and actor_logstd [1, A]; for choices critic.<i> and actor.<i>.
The activation is tanh. ``NormalizeObservation`` of Gymnasium, (x - mean) / sqrt(var + 1e-8) clamped
to ±10, and ``NormalizeReward`` are parts of the environment, so that their statistics are not in
the file. ``ClipAction`` clips actions to the bounds of the task.
"""

from __future__ import annotations

from pathlib import Path

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import untrusted_files
from embodied_ppo.tools.import_policy.imported import ImportedPolicy
from embodied_ppo.tools.import_policy.layers import StateDict
from embodied_ppo.tools.import_policy.normalizers import read_normalizer

RETURNS_NOTE = (
    "values are of rewards divided by a deviation that is not in the file; it is measured again as"
    " training goes on (or add return_var and return_count to normalizer=FILE.npz)"
)


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of CleanRL.

    Args:
        path: The file.
        normalizer: Statistics of the observations, ``NONE`` where the training had none.

    Raises:
        ConfigError: The file is damaged, has other layers, or the normaliser is missing.
    """
    label = untrusted_files.label_of(path)
    tensors = untrusted_files.tensors(untrusted_files.read_torch(path, label), label, "the file")
    state = StateDict(tensors, label)
    log_std = state.take("actor_logstd")
    name = "actor" if log_std is None else "actor_mean"
    actor, critic = state.mlp(name), state.mlp("critic")
    state.finish()
    if not actor or not critic:
        problem = f"has no layers {name}.<i> and critic.<i>"
        raise ConfigError(f"name a file of CleanRL: {label} {problem}")
    if normalizer is None and log_std is not None:
        raise ConfigError(
            "write normalizer=FILE, of np.savez(FILE, mean=rms.mean, var=rms.var, count=rms.count)"
            f" with the obs_rms of the environment, or normalizer=none: {label} does not contain"
            " the normaliser"
        )
    statistics, scale = read_normalizer(normalizer)
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=None if log_std is None else log_std.flatten(),
        normalizer=statistics,
        value_scale=scale,
        normalized_rewards=log_std is not None,
        default_activation="tanh",
        action_mapping="clip",
        notes=(RETURNS_NOTE,) if log_std is not None and scale is None else (),
    )
