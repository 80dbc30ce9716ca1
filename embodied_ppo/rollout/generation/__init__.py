"""Decoding of language models.

Belongs here: the decode loop with its key-value cache, sampling, CUDA graphs, and the adapter to
vLLM.

Does not belong here: prompts, grading, trajectories.

To add a decode engine: implement ``engine.Generator``, add its name to ``RolloutConfig.engine`` and
construct it in ``rollout.language_inputs.make_engine``.
"""
