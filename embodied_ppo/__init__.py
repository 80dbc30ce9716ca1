"""PPO for robot policies in vectorised simulators, and for language models that reason."""

__version__ = "0.1.0"
