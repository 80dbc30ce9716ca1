"""Supervised training before and during PPO.

Belongs here: behaviour cloning of robot policies, supervised fine-tuning of language models,
recording of scripted experts.

Does not belong here: readers and writers of data files (``data``).

To add a policy to behaviour cloning: subclass ``policies.vla.vla_policy.VLA``, whose
``action_loss`` returns the loss (``policies.vla.gaussian`` is the shortest example), and add the
class to ``robot_policy.Family``. To add a scripted expert: record it in
``embodied_envs.tasks.expert_recorder``, and accept its ``env.id`` in ``expert_demos``, which
accepts Tabletop only.
"""
