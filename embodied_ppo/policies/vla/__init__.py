"""Vision-language-action policies: small ones of our own and readers of published checkpoints.

Belongs here: the trunk of the small policies, the base classes of all policies (``vla_policy``),
one module for each action head (tokens, flow matching, Gaussian), one module and one file reader
for each published family, and what families share: weights of published directories
(``published_weights``), layers that attend to a prefix (``prefix``).

Does not belong here: simulators, behaviour cloning, training.

To add a published family:
    1. Add its type in config.json and the model.policy that reads it to
       ``published_weights.KINDS``.
    2. Write its model, and a module of its files: a table of substitutions from published keys to
       parameters, and ``read`` with ``published_weights.load``. With action tokens
       (``model.policy=token``) the model has the attributes and methods of ``openvla.OpenVLA``, and
       the result of its ``embed_prompt`` has a tensor ``x`` [B, ..]; construct it in
       ``pretrained.PublishedVLA``. A flow policy is a subclass of ``pi0.PI0``, as
       ``smolvla.SmolVLA``; add it to ``published.FLOW_FAMILIES``.
    3. Name it in the message of ``published_weights.read_kind`` and in the docstring of
       ``ModelConfig.checkpoint``.
"""
