"""Compares this tree with a commit: runs a command for each method, problem and placement.

    python tests/cells.py --against=HEAD~3     # all cells
    python tests/cells.py --against=HEAD~3 'trpo'
    python tests/cells.py --against=HEAD~3 --except=reproducible --renamed=squash:tanh_squash

Each cell is a run of three iterations; control runs use double precision. A cell records its exit
code, its files and their keys, the digest of its program, its metrics, its final state to the bit,
and the values that a Python call returns. The command exits with 1 if a record differs. Digests
depend on the version of JAX, so no digest is stored.

An exception names a part of a record that may differ: a key of a JSON file with settings, the name
of a file with settings, or `said` (the last line of a failed command). Exit codes, metrics, results
and final states never have an exception.
"""

import argparse
import collections
import contextlib
import hashlib
import inspect
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKERS = 2

SEEDS = ["--seeds=2", "--log_every=1", "--eval_every=2"]
CONTROL = [
    *("control", *SEEDS, "--eval_episodes=2", "--network.width=8"),
    *("--problem.num_envs=4", "--problem.num_steps=8", "--total_steps=96"),
]
STEPS = ["--config.num_epochs=2", "--config.num_minibatches=2"]
FIT = ["--config.value_epochs=1", "--config.value_minibatches=2"]
NATURAL = [*FIT, "--config.cg_iterations=2"]
GROUPS = [
    *("control", *SEEDS, "--eval_episodes=2", "--network.width=8", *STEPS),
    *("--problem.num_prompts=4", "--problem.group_size=4", "--problem.num_steps=24"),
    "--total_steps=1152",
]
LANGUAGE = [
    *("language", *SEEDS, "--eval_prompts=4", "--show=1", "--total_steps=48"),
    *("--problem.num_prompts=4", "--problem.group_size=4", "--warm_start.steps=2"),
    *("--model.width=8", "--model.layers=1", "--model.heads=2", "--model.kv_heads=2"),
    *("--model.mlp_width=16", "--warm_start.batch_size=4"),
]
ADDITION = [*LANGUAGE, "--task.num_digits=1"]
ONE, ROWS, BOTH = ["--devices=1"], ["--mesh=data:2"], ["--mesh=seed:2,data:2"]
TRPO = ["--algorithm=trpo", *CONTROL, *ONE, *NATURAL]
PPO = ["--algorithm=ppo", *CONTROL, *ONE, *STEPS]
GRPO = ["--algorithm=grpo", *ADDITION, *ONE, *STEPS]
NORMALISED = ["--env=Pendulum-v1", "--problem.normalize_observations"]


def load(out):
    """Returns the actions that the policy of a stored run takes on fixed observations."""
    import jax
    import numpy as np

    from jaxrl_po import run

    train(CELLS["ppo, Pendulum"], out)
    seen = np.linspace(-1.0, 1.0, 12).reshape(4, 3)
    # The argument was named `seed` in version 0.4.
    index = {"seed", "seed_index"} & inspect.signature(run.load).parameters.keys()
    policies = [run.load(out, **dict.fromkeys(index, seed)) for seed in range(2)]
    keys = None, jax.random.key(0)
    return [policy.act(seen, key).tolist() for policy in policies for key in keys]


def adapters(out):
    """Trains adapters over the model of a stored run; returns completions."""
    from jaxrl_po import run

    base = out.parent / "base"
    train(CELLS["grpo"], base)
    train([*CELLS["grpo"], f"--init_from={base}", "--lora.rank=2"], out)
    return run.load(out).generate(["1+2=", "3+4="])


def own_learner(out):
    """Trains a learner that is made in Python; returns the learner's metrics."""
    import gymnax

    from jaxrl_po import a2c, control, run

    env = gymnax.make("CartPole-v1")[0]
    problem = control.make_problem(env, num_envs=4, num_steps=8)
    evaluate = control.make_evaluate(env, problem, num_episodes=2)
    learner = a2c.make(a2c.Config(), problem)
    trained = run.train(
        *(learner, 3),
        **{"seeds": 2, "steps_per_iteration": 32, "evaluate": evaluate, "score": "return"},
        **{"out": out, "log_every": 1},
    )
    return untimed(trained.rows)


CELLS = {
    "reinforce": ["--algorithm=reinforce", *CONTROL, *ONE, *FIT],
    "a2c": ["--algorithm=a2c", *CONTROL, *ONE],
    "npg": ["--algorithm=npg", *CONTROL, *ONE, *NATURAL],
    "trpo": TRPO,
    "trpo, rows over devices": ["--algorithm=trpo", *CONTROL, *ROWS, *NATURAL],
    "trpo, vine": [
        *("--algorithm=trpo", *CONTROL, *ONE, "--config.cg_iterations=2", "--sampling=vine"),
        *("--problem.num_branches=2", "--problem.horizon=4", "--total_steps=300"),
    ],
    "trpo, Pendulum": [*TRPO, *NORMALISED],
    "ppo": PPO,
    "ppo, seeds over devices": ["--algorithm=ppo", *CONTROL, "--devices=2", *STEPS],
    "ppo, seeds and rows over devices": ["--algorithm=ppo", *CONTROL, *BOTH, *STEPS],
    "ppo, Pendulum": [*PPO, *NORMALISED, "--problem.scale_rewards"],
    "ppo, memory": [*PPO, "--network.memory=gru"],
    "ppo, microbatches": [*PPO, "--config.num_microbatches=2"],
    "ppo, host": [
        *("--algorithm=ppo", *CONTROL, "--devices=2", *STEPS, "--env=gymnasium:CartPole-v1")
    ],
    "ppo, load": load,
    "ppo_penalty": ["--algorithm=ppo_penalty", *CONTROL, *ONE, *STEPS],
    "grpo in control": ["--algorithm=grpo", *GROUPS, *ONE],
    "dapo in control, rows over devices": ["--algorithm=dapo", *GROUPS, *ROWS],
    "sweep": [
        *("sweep", "--seeds=2", "--devices=2", "--total_steps=96", "--evaluations=1"),
        *("--eval_episodes=2", "--problem.num_envs=4", "--problem.num_steps=8", *STEPS),
        "--config.learning_rate=1e-3,1e-2",
    ],
    "language, a2c": ["--algorithm=a2c", *ADDITION, *ONE],
    "language, trpo": ["--algorithm=trpo", *ADDITION, *ONE, *NATURAL],
    "language, ppo": ["--algorithm=ppo", *ADDITION, *ONE, *STEPS],
    "language, ppo, rows over devices": ["--algorithm=ppo", *ADDITION, *ROWS, *STEPS],
    "language, ppo, reward model": [
        *("--algorithm=ppo", *ADDITION, *ONE, *STEPS, "--reward=model"),
        *("--reward_model.width=8", "--reward_model.mlp_width=8"),
    ],
    "grpo": GRPO,
    "grpo, blocks over devices": ["--algorithm=grpo", *ADDITION, "--mesh=model:2", *STEPS],
    "grpo, rows over devices": ["--algorithm=grpo", *ADDITION, *ROWS, *STEPS],
    "grpo, stale rows": [*GRPO, "--sampler.staleness=1"],
    "grpo, dialogues": ["--algorithm=grpo", *LANGUAGE, *ONE, *STEPS, "--task=mastermind"],
    "grpo, reward in Python": [
        *(*GRPO, f"--reward={ROOT / 'tests' / 'support' / 'reward_functions.py'}:digits")
    ],
    "grpo, language, adapters": adapters,
    "dapo": ["--algorithm=dapo", *ADDITION, *ONE, *STEPS],
    "rloo": ["--algorithm=rloo", *ADDITION, *ONE],
    "sapo": ["--algorithm=sapo", *ADDITION, *ONE],
    "own learner": own_learner,
    "a flag that is not there": [*CONTROL, "--problem.num_env=4"],
}
MEASURED = (".jsonl", "summary.json", "sweep.json")  # names of files that allow no exceptions
FREE = [("names",), ("contents",), ("said",)]  # parts of a record that may have exceptions
FORMER = {}  # map from a flag's name to its name in the other tree


def command(argv, out):
    """Returns the exit code of a `jaxrl-po` command, run as `python -m jaxrl_po`."""
    kind = next(word for word in argv if word[0] != "-")
    argv = [kind, *(flag for flag in argv if flag != kind), f"--out={out}"]
    names = [flag.removeprefix("--").partition("=") for flag in argv[1:]]
    former = [f"--{FORMER.get(name, name)}{equal}{value}" for name, equal, value in names]
    sys.argv = ["jaxrl-po", kind, *former]
    try:
        runpy.run_module("jaxrl_po", run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception as error:
        return str(error)
    return 0


def train(argv, out):
    code = command(argv, out)
    assert code == 0, code


def state(folder):
    """Returns a digest of the arrays in the newest checkpoint."""
    import numpy as np
    import orbax.checkpoint as ocp

    steps = sorted(
        (path for path in folder.glob("*") if path.name.isdigit()), key=lambda p: int(p.name)
    )
    if not steps:
        return None
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(steps[-1] / "default")
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.asarray(arrays[name]).tobytes())
    return digest.hexdigest()[:16]


def untimed(value):
    """Returns JSON without the entries that differ between equal runs: times, memory, paths,
    code."""
    outside = ("time/", "memory/", "compile_seconds", "seconds", "steps_per_second", "source")
    outside += ("revision", "out", "peak", "digest")
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not k.startswith(outside)}
    return [untimed(each) for each in value] if isinstance(value, list) else value


def record(cell):
    """Returns the complete record of one cell as JSON."""
    with tempfile.TemporaryDirectory() as place:
        out, said = Path(place) / "run", io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code, result = (0, cell(out)) if callable(cell) else (command(cell, out), None)
            except Exception as error:
                code, result = str(error), None
        files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.json*"))
        files = [name for name in files if not name.startswith("checkpoints")]
        texts = {name: (out / name).read_text().replace(place, "") for name in files}
        contents = {
            name: [untimed(json.loads(line)) for line in text.splitlines()]
            if name.endswith("jsonl")
            else untimed(json.loads(text))
            for name, text in texts.items()
        }
        return {
            "code": code,
            "names": {path.name: True for path in sorted(out.glob("*"))},
            "contents": contents,
            "state": state(out / "checkpoints" / "latest"),
            "result": result,
            "said": [] if code == 0 else said.getvalue().splitlines()[-1:],
        }


def work(names):
    """Prints the record of each cell as a line."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.devices()  # start all devices before a command asks for fewer devices
    for name in names:
        # Language runs compute in single precision, whatever the default precision is.
        cell = CELLS[name]
        jax.config.update("jax_enable_x64", "language" not in (name if callable(cell) else cell))
        print(json.dumps({"cell": name} | record(cell)), flush=True)


def records(tree, names, renamed=""):
    """Returns the records of cells by name, from the library in `tree`, run in other processes."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", f"--renamed={renamed}", *names[i::WORKERS]],
            env=environment,
            cwd=tree,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(WORKERS)
    ]
    lines = [line for worker in workers for line in worker.communicate()[0].splitlines()]
    return {found.pop("cell"): found for found in map(json.loads, lines)}


def with_new_names(value, renamed):
    """Returns JSON in which some keys are renamed."""
    if isinstance(value, dict):
        return {renamed.get(k, k): with_new_names(each, renamed) for k, each in value.items()}
    return [with_new_names(each, renamed) for each in value] if isinstance(value, list) else value


def differences(before, after, path=()):
    """Yields the path and both values of each difference between two records."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(set(before) | set(after)):
            yield from differences(before.get(name), after.get(name), (*path, name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, (*path, str(i)))
    elif before != after:
        yield path, f"{json.dumps(before)[:60]} → {json.dumps(after)[:60]}"


def is_exact(path):
    """Returns True if a difference at the path does not have an exception."""
    return path[:1] not in FREE or any(name.endswith(MEASURED) for name in path)


def measured(found):
    """Yields the files with metrics and scores in the records, and the keys of the files' rows."""
    for each in found.values():
        for file, content in each["contents"].items():
            if file.endswith(MEASURED):
                yield file
                for row in content if isinstance(content, list) else ():
                    yield from row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", default="HEAD")
    parser.add_argument("--except", dest="exceptions", default="", metavar="KEY,…")
    parser.add_argument("--renamed", default="", metavar="OLD:NEW,…", help="keys and flags")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("cells", nargs="*", help="parts of names; all by default")
    options = parser.parse_args()
    renamed = dict(pair.split(":") for pair in options.renamed.split(",") if pair)
    exceptions = set(filter(None, options.exceptions.split(",")))
    if options.work:
        FORMER.update({new: old for old, new in renamed.items()})
        return work(options.cells)
    names = [n for n in CELLS if not options.cells or any(part in n for part in options.cells)]
    with tempfile.TemporaryDirectory() as place:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", place, options.against], check=True)
        try:
            before = records(Path(place), names, options.renamed)
        finally:
            subprocess.run([*git, "remove", "--force", place], check=True)
    after = records(ROOT, names)
    exact = {"code", "state", "result", "names", "contents"}
    exact |= {*measured(before), *measured(after)}
    if refused := exact & {*exceptions, *renamed, *renamed.values()}:
        parser.error(f"no exception for {', '.join(sorted(refused))}")
    changed, used = 0, collections.Counter()
    for name in names:
        old = with_new_names(before.get(name), renamed)
        found = []
        for path, values in differences(old, after.get(name)):
            keys = [] if is_exact(path) else exceptions.intersection(path)
            used.update(keys)
            found += [] if keys else [f"/{'/'.join(path)}: {values}"]
        changed += bool(found)
        ended = after.get(name, {}).get("code")
        print(f"{name}, exit {ended}: {'; '.join(found[:5]) if found else 'the same'}")
    print(f"{len(names) - changed} of {len(names)} cells are the same")
    for key in sorted(exceptions):
        print(f"exception {key}: {used[key]} differences")
    print("".join(f"renamed {old}: {new}\n" for old, new in renamed.items()), end="")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
