"""A checkpoint with the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from embodied_envs.types import Say
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, ModelConfig
from embodied_ppo.policies import own_network
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_directory import config_hash, digest, stored_config


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
    say: Say

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


def open_run(path: str, option: str = "checkpoint", *, say: Say = lambda line: None) -> TrainedRun:
    """Return a verified checkpoint with its run.

    Args:
        path: Directory of a run, or of a checkpoint.
        option: The option that names ``path``, for messages.
        say: Reports a line to the user.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: Its options are not of this version.
    """
    source = checkpoint.open_checkpoint(path, option)
    # If a checkpoint was moved out of its run, the folder that contains it counts as the run.
    folder = source.path.parent
    run_dir = folder.parent if folder.name == "checkpoints" else folder
    return TrainedRun(stored_config(source), source, run_dir, say)


MODEL = "config.json"  # a directory with this file is a model as transformers writes it


def open_evaluated(
    path: str, option: str = "checkpoint", *, say: Say = lambda line: None
) -> TrainedRun:
    """Return what ``open_run`` returns, also for the directory of a language model.

    Such a directory counts as the checkpoint before the first update of a run with default options,
    which trains this model. The directory of that run, ``evaluations/NAME-DIGEST``, only receives
    reports.

    Args:
        path: Directory of a model, a run or a checkpoint.
        option: The option that names ``path``, for messages.
        say: Reports a line to the user.

    Raises:
        CheckpointError, ConfigError: See ``open_run``.
    """
    if not Path(path, MODEL).is_file():
        return open_run(path, option, say=say)
    folder = Path(path).absolute()
    # No prompt is left out: the score of a part of the data would be another one.
    options = {"actor.model.path": str(folder), "algorithm.prompt_length": 10**7}
    layer = {"mode": "reasoning", "name": folder.name, **options}
    config = loader.read(Config, [(option, layer)]).config
    manifest = {"update": 0, "tokens": 0, "config_hash": config_hash(config)}
    run_dir = Path("evaluations") / f"{folder.name}-{digest({'model': str(folder)})[:6]}"
    return TrainedRun(config, checkpoint.Checkpoint(folder, manifest), run_dir, say)
