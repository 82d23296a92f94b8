"""What the experiment scripts share: their flags, the table of algorithms, and the way from flags to a folder of results."""

import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_po import config, flags, folder, metrics, parallel, plotting, processes, runner, sharding
from jaxrl_po.algorithms import a2c, cispo, dapo, dr_grpo, grpo, gspo, npg, ppo, reinforce, reinforce_pp, rloo, trpo
from jaxrl_po.checkpoint import CheckpointError
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError, Interval, static
from jaxrl_po.flags import UsageError
from jaxrl_po.parallel import Placement
from jaxrl_po.progress import Progress
from jaxrl_po.types import Actor, ActorCritic, Learner, TrainState

WITH_CRITIC = {"reinforce": reinforce, "a2c": a2c, "npg": npg, "trpo": trpo, "ppo": ppo}
IN_GROUPS = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "gspo": gspo,
    "cispo": cispo,
}
ALGORITHMS = WITH_CRITIC | IN_GROUPS
PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "jaxrl_po")
DECAY = "config.decay_iterations"
PER_PROCESS = ("out", "coordinator", "process_id")  # flags that may differ between processes, or are compared by themselves
LINES = 50  # of metrics.jsonl, where --log_every is left to choose


@config.record
class Options:
    """The run as a whole."""

    algorithm: str = static("ppo", f"one of {', '.join(ALGORITHMS)}")
    out: str = static("", "folder for the results, which must be new, empty or resumed")
    seeds: int = static(16, "runs side by side, each with its own random numbers", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed, from which those of all runs follow", within=NON_NEGATIVE)
    total_steps: int = static(
        500_000, "length of each run, counted for one seed: environment steps, or completions", within=COUNT
    )
    devices: str = static("auto", "devices to shard seeds (or rows) over; auto on a CPU is one for each core")
    mesh: str = static(
        "",
        "devices by hand, as in seed:2,data:4: seeds over the one axis, rows over the other; model:M cuts a transformer's blocks",
    )
    log_every: int = static(
        0, f"iterations pooled into one line; 0 makes about {LINES} lines", unit="iterations", within=NON_NEGATIVE
    )
    eval_every: int = static(5, "lines between evaluations", unit="lines", within=COUNT)
    checkpoint_every: int = static(1, "lines between checkpoints", unit="lines", within=COUNT)
    patience: int = static(10, "iterations in a row with non-finite updates only, after which the run stops", within=COUNT)
    idle_patience: int = static(
        100, "iterations in a row in which no group of any seed is informative, after which the run ends", within=COUNT
    )
    resume: bool = static(False, "go on with the run in --out; flags that are not given are as they were")
    overwrite: bool = static(False, "replace the run in --out")
    distributed: bool = static(False, "be one of several processes, all started with the same flags but for --process_id")
    coordinator: str = static("", "host:port where process 0 listens; empty to ask the cluster (SLURM, Kubernetes, TPU pod)")
    num_processes: int = static(0, "processes of the run; 0 to ask the cluster", within=NON_NEGATIVE)
    process_id: int = static(-1, "of this process, from 0; -1 to ask the cluster", within=Interval(-1))
    coordinator_timeout: int = static(
        120, "wait for all processes to meet, and later for a sign of life of each", unit="seconds", within=COUNT
    )

    def validate(self) -> None:
        """Refuses what would have no effect."""
        for name in ("coordinator", "num_processes", "process_id", "coordinator_timeout"):
            config.require(self, name, self.distributed, "--distributed is given")


class Experiment(NamedTuple):
    """What a script builds from its flags.

    Attributes:
      learner: of one seed.
      evaluate: `(params, actor, key) -> {name: array}` of one seed; each is logged as the mean over its array.
      score: the evaluated name that marks the best checkpoint.
      steps_per_iteration: environment steps (or completions) of one iteration.
      initial: what `summary.json` calls the score of the initial policy; empty to leave it out.
      examples: of the first seed, shown at each evaluation; `describe(params, actor, key)` is given the key of the evaluation.
      axes: of the parameters, where they can be cut over devices, or None.
    """

    learner: Learner
    evaluate: Callable[[ActorCritic, Actor, jax.Array], dict[str, jax.Array]]
    score: str
    steps_per_iteration: int
    initial: str = ""
    examples: runner.Examples | None = None
    axes: sharding.LogicalAxes | None = None


class Script(NamedTuple):
    """What makes one script differ from another.

    Attributes:
      name: of the script.
      summary: first line of `--help`.
      options: record of the flags without a prefix, an extension of `Options`.
      defaults: options to flags and their defaults, where those of the records do not suit.
      sections: options to prefix and record, beside `config`, which is the algorithm's.
      rows: records to the rows (environments or prompts) of one seed.
      shards_params: options to whether parameters are cut over the devices of the rows.
      build: `(records, algorithm, placement) -> Experiment`; raises ConfigError or UsageError.
      title: records to what runs on what.
      unit: what a step is.
      curves: metrics to draw, with their labels.
      y_label: of the curves.
    """

    name: str
    summary: str
    options: type
    defaults: Callable[[Any], Mapping[str, Any]]
    sections: Callable[[Any], Mapping[str, type]]
    rows: Callable[[Mapping[str, Any]], int]
    shards_params: Callable[[Any], bool]
    build: Callable[[Mapping[str, Any], Any, Placement], Experiment]
    title: Callable[[Mapping[str, Any]], str]
    unit: str
    curves: tuple[plotting.Series, ...]
    y_label: str


def main(script: Script, argv: Sequence[str]) -> int:
    """Runs a script from its arguments; returns the exit status: 0 done or interrupted and saved, 1 diverged.

    Raises:
      UsageError: before anything is compiled, and with nothing changed in the folder.
    """
    if {"--help", "-help", "-h"} & set(argv):
        options = flags.parse([a for a in argv if a.lstrip("-") not in ("h", "help")], {"": script.options}, partial=True)[""]
        sections = sections_of(script, options)
        print(flags.usage(f"{script.name}.py", script.summary, sections, script.defaults(options)))
        return 0

    options = flags.parse(argv, {"": script.options}, partial=True)[""]
    if options.distributed:
        processes.start(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout=options.coordinator_timeout,
        )
    with processes.together() as require_same:
        plan = prepare(script, argv, options, require_same)
    records, options = plan.records, plan.records[""]

    with contextlib.ExitStack() as stack:
        with processes.together():
            out = stack.enter_context(folder.claim(options.out, overwrite=options.overwrite))
            if processes.is_writer():
                settings = {name: value for name, value in flags.flatten(records).items() if name not in folder.OF_A_START}
                folder.write_json(out / folder.CONFIG, {"script": script.name, **settings, "resolved": plan.resolved})
        outcome = train(plan.job, out, script, plan.title, resume=options.resume)
        if processes.is_writer():
            rows = metrics.read(out / "metrics.jsonl")
            plotting.save([panel(script, plan.title, rows)], out / "curves.png")
            if rows[-1]["iteration"] == plan.job.iterations or (outcome is not None and outcome.idle):
                folder.write_json(out / "summary.json", summarise(rows, plan.experiment, options, plan.resolved))
    return 1 if outcome is None else 0


class Plan(NamedTuple):
    """What is to be run, all of it checked.

    Attributes:
      records: prefix to record.
      experiment: of one seed.
      job: over all seeds and devices.
      title: for a person.
      resolved: what the flags left to choose.
    """

    records: dict[str, Any]
    experiment: Experiment
    job: runner.Job
    title: str
    resolved: dict[str, Any]


def prepare(script: Script, argv: Sequence[str], options: Options, require_same: Callable[[Mapping[str, Any]], None]) -> Plan:
    """Reads all flags, chooses where everything lies and builds the job; nothing is compiled and nothing is written.

    Args:
      script: see `Script`.
      argv: its arguments.
      options: those of the run as a whole, as far as they are given.
      require_same: see `processes.together`.
    """
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    if stored.get("script", script.name) != script.name:
        raise UsageError(f"--resume: --out={options.out} holds a run of {stored['script']}.py, not of {script.name}.py")
    records = parse(script, argv, stored)
    options = records[""]
    sections = sections_of(script, options)
    settings = flags.flatten(records)
    holds = f"{options.out} ({'with a run' if stored else 'without a run'})"  # all must see the same folder
    require_same({"out": holds, **{name: settings[name] for name in settings if name not in PER_PROCESS}})
    folder.require_same(settings, stored, options.out)

    title = f"{script.title(records)}, {options.seeds} seeds"
    with flags.blame(sections):
        placement = parallel.choose(
            options.devices,
            num_seeds=options.seeds,
            num_rows=script.rows(records),
            mesh=options.mesh,
            shard_params=script.shards_params(options),
            num_processes=options.num_processes if options.distributed else 1,
        )
        experiment = script.build(records, ALGORITHMS[options.algorithm], placement)
        if placement.cuts_params and experiment.axes is None:
            raise UsageError(f"--mesh={options.mesh}: model is for language.py; the networks of {script.name}.py are not cut")
        iterations = count_iterations(options.total_steps, experiment.steps_per_iteration, script.unit)
        if DECAY in script.defaults(options) and not stored and DECAY not in given(argv):
            # A tuned decay ends with the run, however long that is.
            records["config"] = dataclasses.replace(records["config"], decay_iterations=iterations)
            experiment = script.build(records, ALGORITHMS[options.algorithm], placement)
        require_learning(records["config"], iterations)
        log_every = stored.get("resolved", {}).get("log_every") or options.log_every or max(1, iterations // LINES)
        job = make_job(experiment, options, placement, iterations=iterations, log_every=log_every)
        runner.check(job)

    resolved = {
        "iterations": iterations,
        "steps_per_iteration": experiment.steps_per_iteration,
        "log_every": log_every,
        "placement": placement.describe(),
        "device": describe_device(),
        "versions": versions(),
    }
    return Plan(records, experiment, job, title, resolved)


def given(argv: Sequence[str]) -> set[str]:
    """Names of the flags among arguments."""
    return {argument.lstrip("-").partition("=")[0] for argument in argv if argument.startswith("-")}


def train(job: runner.Job, out: Path, script: Script, title: str, *, resume: bool) -> runner.Outcome | None:
    """Runs the job and says how it ended; returns its outcome, or None where it diverged."""
    watch, quiet = [series.metric for series in script.curves], not processes.is_writer()
    with Progress(title, job.iterations * job.steps_per_iteration, unit=script.unit, watch=watch, quiet=quiet) as progress:
        try:
            outcome = runner.run(job, out, progress, resume=resume)
        except runner.Diverged as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        except CheckpointError as error:
            raise UsageError(f"--resume: {error}; start afresh with --overwrite or another --out") from None
        if outcome.interrupted:
            progress.tell(f"{title}: stopped and saved at iteration {outcome.iteration}; --resume goes on from there")
        elif outcome.idle:
            progress.tell(
                f"{title}: ended at iteration {outcome.iteration}: all members of a group scored alike in every group of every "
                f"seed for --idle_patience={job.idle_patience} iterations. The task is too hard or too easy for the policy: warm "
                "start it further, choose another difficulty, or raise --problem.group_size"
            )
        else:
            progress.tell(f"{title}: done, results in {out}")
    return outcome


def parse(script: Script, argv: Sequence[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix to record, from arguments and, where they leave something out, from the `config.json` of an earlier run."""
    options = flags.parse(argv, {"": script.options}, stored=stored, partial=True)[""]
    return flags.parse(argv, sections_of(script, options), stored=stored, defaults=script.defaults(options))


def read_run(script: Script, flag: str, run: str) -> dict[str, Any]:
    """The settings of an earlier run of a script, prefix to record.

    Args:
      script: that made it.
      flag: which names its folder.
      run: the folder.
    """
    if not run:
        raise UsageError(f"--{flag} must name the folder of a run of {script.name}.py, e.g. --{flag}=runs/first")
    wanted = f"--{flag}={run} must be the folder of a run of {script.name}.py"
    try:
        stored = dict(json.loads((Path(run) / folder.CONFIG).read_text(encoding="utf-8")))
    except OSError:
        raise UsageError(f"{wanted}; it holds no {folder.CONFIG}") from None
    except (TypeError, ValueError):
        raise UsageError(f"--{flag}={run} holds a {folder.CONFIG} that is damaged") from None
    if stored.get("script") != script.name:
        raise UsageError(f"{wanted}, not of {stored.get('script')}.py")
    with blame_run(flag, run):
        return parse(script, [], stored)


@contextlib.contextmanager
def blame_run(flag: str, run: str) -> Iterator[None]:
    """Inside, settings or states that are not what this version of the library makes become an error that names the flag."""
    try:
        yield
    except (CheckpointError, ConfigError, UsageError) as error:
        raise UsageError(f"--{flag}={run} does not suit this version of the library: {error}") from None


def sections_of(script: Script, options: Any) -> dict[str, type]:
    """Prefix to record, with the algorithm's own."""
    algorithm = flags.lookup("algorithm", options.algorithm, ALGORITHMS)
    return {"": script.options, "config": algorithm.Config, **script.sections(options)}


def count_iterations(total_steps: int, steps_per_iteration: int, unit: str) -> int:
    """Whole iterations in `total_steps`."""
    if total_steps < steps_per_iteration:
        raise UsageError(f"--total_steps={total_steps} must be at least {steps_per_iteration}, the {unit} of one iteration")
    return total_steps // steps_per_iteration


def require_learning(settings: Any, iterations: int) -> None:
    """Refuses iterations in which the learning rate has already fallen to 0; a method without a decay has none."""
    decay_iterations = vars(settings).get("decay_iterations", 0)
    if 0 < decay_iterations < iterations:
        raise UsageError(
            f"--config.decay_iterations={decay_iterations} must be 0 or at least {iterations}, the iterations of --total_steps: "
            "the learning rate is 0 after it"
        )


def make_job(experiment: Experiment, options: Options, placement: Placement, *, iterations: int, log_every: int) -> runner.Job:
    """The experiment over all seeds and devices."""
    training_key, evaluation_key = jax.random.split(jax.random.key(options.seed))
    if experiment.axes is not None and placement.cuts_params:
        learner = sharding.over_mesh(experiment.learner, placement, experiment.axes)
    else:
        learner = parallel.over_devices(experiment.learner, placement)

    def evaluate(state: TrainState) -> dict[str, jax.Array]:
        of_seed = jax.vmap(lambda state: experiment.evaluate(state.params, state.actor, evaluation_key))
        values = parallel.spread(of_seed, placement)(state)
        return {name: value.reshape(options.seeds, -1).mean(axis=1) for name, value in values.items()}

    replicated = parallel.replicated(placement) if processes.several() else None
    seeds = jax.numpy.arange(options.seeds)
    return runner.Job(
        learner=Learner(jax.jit(learner.init), jax.jit(learner.step)),
        keys=jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), out_shardings=replicated)(training_key, seeds),
        iterations=iterations,
        steps_per_iteration=experiment.steps_per_iteration,
        log_every=log_every,
        eval_every=options.eval_every,
        checkpoint_every=options.checkpoint_every,
        patience=options.patience,
        idle_patience=options.idle_patience,
        evaluate=evaluate,
        score=experiment.score,
        examples=experiment.examples and of_first_seed(experiment.examples, evaluation_key),
        where=placement.describe(),
        replicated=replicated,
    )


def of_first_seed(examples: runner.Examples, key: jax.Array) -> runner.Examples:
    """Those of the first seed of a stacked state; `key` is fixed, so that every evaluation shows the same."""

    def describe(state: TrainState) -> Any:
        params, actor = jax.tree.map(lambda x: x[0], (state.params, state.actor))
        return examples.describe(params, actor, key)

    return runner.Examples(describe, lambda arrays: [{"seed": 0, **row} for row in examples.render(arrays)])


def summarise(
    rows: Sequence[metrics.Row], experiment: Experiment, options: Options, resolved: Mapping[str, Any]
) -> metrics.Row:
    """The content of `summary.json`; `steps` counts one seed, `steps_per_second` all of them."""
    first, last, score = rows[0], rows[-1], experiment.score
    seconds = sum(row.get("time/seconds", 0.0) for row in rows)
    return {
        **({experiment.initial: first[score]} if experiment.initial else {}),
        score: last[score],
        f"{score}_iqm": last[f"{score}/iqm"],
        "steps": last["step"],
        "steps_per_second": last["step"] * options.seeds / seconds,
        "compile_seconds": last["time/compile_seconds"],
        "algorithm": options.algorithm,
        "seed": options.seed,
        "seeds": options.seeds,
        **{name: resolved[name] for name in ("placement", "device", "versions")},
    }


def panel(script: Script, title: str, rows: Sequence[metrics.Row], target: float | None = None) -> plotting.Panel:
    """The learning curves of a run."""
    return plotting.Panel(rows, script.curves, title, f"{script.unit}, each seed", script.y_label, target)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def describe_device() -> str:
    """The devices, in words."""
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{jax.device_count()} × {jax.devices()[0].device_kind}{several}"
