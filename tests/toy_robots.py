"""A quadruped, with servos on two legs and torque motors on the others, and a cube; a drone."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).with_name("models")
QUADRUPED = (MODELS / "quadruped.xml").read_text()
# Four motors hold 1 kg.
DRONE = (MODELS / "drone.xml").read_text()
