"""Configurations that ship: groups mode, env, model, algorithm, placement and experiment."""
