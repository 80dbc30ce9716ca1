"""Simulators behind one protocol, ``embodied_ppo.types.VectorEnv``: one file per simulator."""
