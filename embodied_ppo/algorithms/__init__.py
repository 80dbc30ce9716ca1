"""PPO: advantages, losses, KL penalties and the optimisation of minibatches.

Belongs here: pure functions of tensors (``advantages``, ``losses``, ``kl``), the loss of one
minibatch (``ppo_loss``), epochs over minibatches (``optimizer``), and the update that calls them
(``learner``). ``actor_critic_learner`` and ``separate_critic_learner`` hold what differs between
robot policies and language models.

Does not belong here: simulators, decoding, processes, files.

To add an advantage estimator: add a branch to ``advantages.estimate`` and its name to
``AlgorithmConfig.adv_type``. To add a KL estimator: add its formula as a branch of ``kl._sampled``,
its name and the name with ``+`` to ``kl.KINDS`` and to ``AlgorithmConfig.kl_loss_type``, and its
name without ``+`` to ``kl_penalty``. To add a term of the loss: add it to ``ppo_loss`` and its
coefficient to ``AlgorithmConfig``.
"""
