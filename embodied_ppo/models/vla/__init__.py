"""Vision-language-action policies: small ones of our own and readers of published checkpoints.

Belongs here: the shared trunk, one module for each action head (tokens, flow matching, Gaussian),
one module and one file reader for each published family.

Does not belong here: simulators, behaviour cloning, training.

To add a published family:
    1. Write its model, a subclass of ``trunk.VLAPolicy``, and a reader of its files; ``pi0`` and
       ``pi0_files`` are an example. A model of action tokens needs the methods of
       ``hf_vlm.VisionLanguage`` only.
    2. Recognise its directory in ``pretrained`` or in ``modes.embodied.components.make_policy``.
"""
