"""Tests of several parts together: commands, placements, experiments, documentation."""
