
MODEL=${MODEL:-/models/base} # a default
source models/other.sh
ROLLOUT_ARGS=(
   --prompt-data "${MODEL}/train.jsonl" \
   # --rollout-batch-size 7
   --rollout-batch-size 64 --n-samples-per-prompt 8
)
ROLLOUT_ARGS+=(
   --global-batch-size 256 --advantage-estimator ppo
)
EVAL_ARGS=(--eval-prompt-data aime /data/a.jsonl math /data/b.jsonl)
UNUSED_ARGS=(--lr 1)
ENV="{
  \"env_vars\": {\"A\": \"1\"}
}"
ray start --head --num-gpus ${NUM_GPUS} --disable-usage-stats
ray job submit --runtime-env-json="${ENV}" -- python3 train.py \
   --actor-num-gpus-per-node ${NUM_GPUS} \
   --colocate \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} "${EVAL_ARGS[@]}" --hf-checkpoint=$MODEL --lr 5e-7 \
   --eps-clip-high 0.3 --use-kl-loss 2>&1 | tee log.txt
