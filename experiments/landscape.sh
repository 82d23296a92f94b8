#!/bin/sh
# 1,000 PPO runs of 100,000 steps on CartPole-v1 in one program: learning rate × clip × ten seeds. Its picture,
# $OUT/sweep.png, is docs/landscape.png.
set -eu
OUT=${1:-runs/landscape}
"${PYTHON:-python}" -m jaxrl_po sweep --env=CartPole-v1 --seeds=10 --total_steps=100000 --eval_episodes=4 \
  --problem.num_envs=16 --problem.num_steps=128 --config.num_epochs=2 --config.num_minibatches=4 \
  --config.learning_rate=1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1 \
  --config.epsilon_high=0.01,0.02,0.05,0.1,0.15,0.2,0.3,0.4,0.6,0.9 --out="$OUT"
