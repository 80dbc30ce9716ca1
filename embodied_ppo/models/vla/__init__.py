"""Vision-language-action policies: small ones of our own and readers of published checkpoints.

Belongs here: the shared trunk, one module for each action head (tokens, flow matching, Gaussian),
one module and one file reader for each published family.

Does not belong here: simulators, behaviour cloning, training.

To add a published family:
    1. Write its model and a reader of its files. With action tokens (``model.policy=token``) the
       model has the attribute ``hidden_size`` and the methods of ``pretrained.OpenVLA``; the
       result of its ``embed_prompt`` has a tensor ``x`` [B, ..]. With another action head it is a
       subclass of ``trunk.VLAPolicy``, as ``pi0.PI0``.
    2. With action tokens, accept its ``model_type`` in ``pretrained._kind`` and construct it in
       ``pretrained.CheckpointVLA``. With another head, select it by config.json in
       ``modes.embodied.components.make_policy`` and add it to ``behavior_cloning.Family``.
    3. Remove its name from ``UNSUPPORTED``, and name it in the message of ``pretrained._kind`` and
       in the docstring of ``ModelConfig.checkpoint``.
"""
