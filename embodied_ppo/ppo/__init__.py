"""PPO, in the order in which to read it.

``ppo`` is the algorithm: one update, and the loss of one minibatch. Then read the formulas that it
calls, ``advantages``, ``losses`` and ``kl``, and the step of AdamW on a minibatch, ``optimizer``.
These five files are enough to understand an update.

What they leave out: ``rewards`` (normalisation and whitening), ``group_advantages`` (several
rewards), ``preparation`` (importance weights, ranks, action chunks), ``schedules`` (learning rate
and coefficients), ``minibatches`` (the interface of a loss, micro-batches), ``compiled_step``
(compiled minibatches and CUDA graphs), ``roles`` (interfaces of actor, critic, reference),
``robot_actor``, ``language_actor`` and ``critic`` (the models), ``learner_state`` (checkpoints),
``metrics``.

Belongs here: what turns a rollout into new weights.

Does not belong here: simulators, decoding, processes, files.

To add an advantage estimator: add a branch to ``advantages.estimate`` and its name to
``AlgorithmConfig.adv_type``; one that compares groups also to ``options.rules.base``'s
``GROUP_ESTIMATORS``. Only gae has a critic in reasoning mode.

To add a KL estimator: add its formula to ``kl.estimate``, its name and the name with ``+`` to
``AlgorithmConfig.kl_loss_type``, and its name without ``+`` to ``kl_penalty``.

To add a term of the loss: add it to ``ppo.PPOLoss.forward`` and its coefficient to
``AlgorithmConfig`` and ``compiled_step.STEP_OPTIONS``; a statistic of it has a name in
``minibatches.PolicyLoss``.

To add a loss of one's own: subclass ``minibatches.MinibatchLoss`` and pass it to
``optimizer.MinibatchOptimizer``, as ``imitation.distillation`` does.
"""
