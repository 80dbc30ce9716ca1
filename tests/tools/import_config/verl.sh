#!/bin/bash
# it's a comment with an apostrophe and an option.of=x \
set -x
export VLLM_USE_V1=1
home=/data; cd $home
train="['$home/a.parquet', '${home}/b.parquet']"
CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.main_ppo \
    --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=gae \
    # algorithm.gamma=0.5 \
    actor_rollout_ref.actor.clip_ratio=0.2 \
    +actor_rollout_ref.actor.clip_ratio_high=0.28   \
    ++critic.optim.lr=1e-5 \
    data.train_files="$train" data.val_files=$HOME/test.parquet \
    data.prompt_key='a#b' trainer.experiment_name="run"\ 1 \
    trainer.logger='["console","wandb"]' \
    trainer.total_training_steps=3\
    data.seed='${algorithm.nothing}' data.max_prompt_length=$(wc -l x) \
    actor=megatron model/engine=veomni ~algorithm.lam trainer.my_own= $@ # trailing=comment
