"""A checkpoint with the run that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from embodied_ppo.options.schema import Config, ModelConfig
from embodied_ppo.policies import own_network
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_directory import stored_config


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint and the run that wrote it.

    Attributes:
        config: Options of the run.
        source: The checkpoint.
        run_dir: Directory of the run.
        say: Reports a line to the user.
    """

    config: Config
    source: checkpoint.Checkpoint
    run_dir: Path
    say: Callable[[str], None]

    def load_weights(self, policy: nn.Module) -> None:
        """Load the weights of the checkpoint into ``policy``. Raises CheckpointError."""
        checkpoint.load_weights(policy, self.source.policy(), self.source.path / checkpoint.POLICY)

    def model(self, *, allow: bool) -> ModelConfig:
        """Return the options of the model, with the file of ``model.network`` that is executed.

        Args:
            allow: Whether the file may differ from that of the training.

        Raises:
            CheckpointError, ConfigError: The file, or the run's copy of it, cannot be read.
        """
        model = self.config.model
        if model.network is None:
            return model
        # The hash shows whether the user's file has changed since the training.
        stored = self.source.manifest.get("network_hash")
        network = own_network.select(
            model.network, stored, self.run_dir, allow=allow, resumes=False, say=self.say
        )
        return replace(model, network=network.spec)


def open_run(path: str, option: str = "checkpoint") -> tuple[checkpoint.Checkpoint, Path, Config]:
    """Return a verified checkpoint, the directory of its run, and the options it was trained with.

    Args:
        path: Directory of a run, or of a checkpoint.
        option: The option that names ``path``, for messages.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: Its options are not of this version.
    """
    source = checkpoint.open_checkpoint(path, option)
    # If a checkpoint was moved out of its run, the folder that contains it counts as the run.
    folder = source.path.parent
    run_dir = folder.parent if folder.name == "checkpoints" else folder
    return source, run_dir, stored_config(source)
