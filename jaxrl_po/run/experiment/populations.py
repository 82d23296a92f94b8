"""Population-based training in a sweep: for each seed, the draws are the members of a population.

An exploit is part of the program of an iteration. Lines of metrics end where exploits come, so that
each line has the settings and the parents of one stretch of training.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po import population
from jaxrl_po.config import ConfigError, Json, Values, setting_of
from jaxrl_po.masked import Mean
from jaxrl_po.population import Space
from jaxrl_po.run.experiment import search_space
from jaxrl_po.run.experiment.prepare import SUCCESS, prepare
from jaxrl_po.run.experiment.search_space import BEST, EVALUATION, Sweep, SweepSpec
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import Panel, Series
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.loop.programs import MICROBATCHES
from jaxrl_po.run.store import checkpoint, folder, metrics
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, Row, TrainState

PARENT, SETTING = "population/parent", "population/"
SECTION = "config."  # section of the settings that are data of the training state


class Plan(NamedTuple):
    """Population of a sweep.

    Attributes:
      space: Values that the settings may take, by name of the method's field.
      settings: Content of `config.json` of the best member's run, with the first member's settings.
    """

    space: Space
    settings: Json


class Exploits(NamedTuple):
    """Entry in `opt_state` of a population of C·S members, leaves `[C·S]`.

    Attributes:
      score: Training score, pooled since the last exploit.
      parent: Index of the member whose state each member had after the last exploit.
    """

    score: Mean
    parent: jax.Array


def space_of(domain: Domain[Any], spec: SweepSpec, first: Values) -> Space:
    """Returns the settings of a population; `first` holds the values of one of its members.

    Raises:
      ConfigError: A flag has a grid or a tie, or a draw of another section or of a static field; or
        an end of a draw is not a valid value.
    """
    method = dataclasses.fields(spec.settings(domain, first).config.method)
    numbers = {f"{SECTION}{x.name}" for x in method if not setting_of(x).static}
    for name in (*spec.swept, *spec.drawn):
        if name in spec.swept or name not in numbers:
            raise ConfigError(
                name,
                "must have one value with exploit_every, or be a number of the method that is "
                "drawn, e.g. config.learning_rate=log_uniform(1e-5,1e-2)",
            )
    bounds, choices = dict[str, tuple[float, float]](), dict[str, list[float]]()
    for name, written in spec.drawn.items():
        kind, texts = search_space.parse_draw(name, written)
        for text in texts:
            if kind == "choice" or float(text):  # no factor makes a number 0
                spec.settings(domain, {**first, name: text})
        values = [float(x) for x in texts]
        if kind == "choice":
            choices[name.removeprefix(SECTION)] = values
        else:
            bounds[name.removeprefix(SECTION)] = values[0], values[1]
    return Space(bounds, choices)


def make_plan(domain: Domain[Any], spec: SweepSpec, first: Values, space: Space) -> Plan:
    """Returns the population of a sweep; must follow the placement of its program on devices."""
    made = spec.settings(domain, first)
    options = {x.name: getattr(made.config.run, x.name) for x in dataclasses.fields(domain.OPTIONS)}
    options |= {"out": str(Path(spec.flags["out"]) / BEST), "overwrite": True, "resume": False}
    options |= {"seeds": 1, "devices": "auto", "mesh": "", "log_every": spec.flags["exploit_every"]}
    config = dataclasses.replace(made.config, run=domain.OPTIONS(**options))
    given = {**made.given, MICROBATCHES: None}  # a sweep does not choose their number
    origins = {x: y for x, y in made.origins.items() if x in options or "." in x}
    job = prepare(domain, made._replace(config=config, given=given, origins=origins))
    return Plan(space, job.output.settings)


def with_exploits(job: TrainJob, options: Sweep, space: Space) -> TrainJob:
    """Returns the job of a population whose members replace each other.

    Before every iteration `k · exploit_every`, k ≥ 1, the draws of each seed are ranked by their
    score since the last exploit, see `population.exploit`. A member without a score ranks lowest.

    Args:
      job: Job of C·S runs whose settings are data of the state, seeds innermost.
      options: Options of the sweep.
      space: Values that the settings may take.

    Raises:
      ConfigError: The program does not compute the score, or has no iteration with an exploit.
    """
    learner, size, seeds, every = job.learner, job.num_seeds, options.seeds, options.exploit_every
    if job.host.rollouts is not None:
        raise ConfigError("exploit_every", "must be 0 with an environment on the host")
    if options.exploit_by == EVALUATION and job.evaluation.score_evaluation is not None:
        raise ConfigError("exploit_by", "must be training: the host computes this evaluation")
    if every >= job.length.iterations:
        iterations = f"{job.length.iterations}, the iterations of total_steps"
        raise ConfigError("exploit_every", f"must be below {iterations}, got {every}")
    success = next(name for name in SUCCESS if name in {x.metric for x in job.display.curves})
    names = [*space.bounds, *space.choices]
    none = Mean(jnp.zeros(size), jnp.zeros(size))

    def begin(state: TrainState) -> TrainState:
        own = jnp.arange(size, dtype=jnp.int32)
        return state._replace(opt_state=(Exploits(none, own), state.opt_state))

    def exploit(state: TrainState, frozen: PyTree) -> TrainState:
        since, (config, opt_state) = state.opt_state
        score = since.score.metric()
        if options.exploit_by == EVALUATION:
            score = job.evaluate(state.with_frozen(frozen))[job.evaluation.score]
        own, of_exploit = jnp.moveaxis(jax.vmap(jax.random.split)(state.key), 1, 0)
        state = state._replace(opt_state=opt_state, key=own)
        values = {name: getattr(config, name) for name in names}
        state, values, score = jax.tree.map(
            lambda x: x.reshape(-1, seeds, *x.shape[1:]), (state, values, score)
        )
        of_seeds = jax.vmap(population.exploit, in_axes=(1, 1, 1, None, 0), out_axes=1)
        after = of_seeds(state, values, score, space, of_exploit[:seeds])
        state, values, parent = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), after)
        since = Exploits(none, parent * seeds + jnp.arange(size, dtype=jnp.int32) % seeds)
        config = dataclasses.replace(config, **values)
        return state._replace(opt_state=(since, (config, state.opt_state)))

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        frozen, step = state.params.frozen, state.step[0]
        due = (step > 0) & (step % every == 0)
        before = state.with_frozen(None)
        state = jax.lax.cond(due, lambda x: exploit(x, frozen), lambda x: x, before)
        since, own = state.opt_state
        state, batch = learner.sample(state.with_frozen(frozen)._replace(opt_state=own))
        return state._replace(opt_state=(since, state.opt_state)), batch

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        since, own = state.opt_state
        state, measured = learner.update(state._replace(opt_state=own), batch)
        since = since._replace(score=since.score + measured[success])
        noted = {SETTING + SECTION + name: getattr(own[0], name) for name in names}
        noted[PARENT] = since.parent.astype(jnp.float32)
        measured |= {name: Mean(x, jnp.ones(size)) for name, x in noted.items()}
        return state._replace(opt_state=(since, state.opt_state)), measured

    def begins(init: Callable[[PyTree], TrainState]) -> Callable[[PyTree], TrainState]:
        return lambda start: begin(init(start))

    warm = job.warm and job.warm._replace(init=begins(job.warm.init))
    together = Learner(jax.jit(begins(learner.init)), jax.jit(sample), jax.jit(update))
    return dataclasses.replace(job, learner=together, warm=warm)


class History(NamedTuple):
    """History of a population of N members, over L lines with E evaluations.

    Attributes:
      lines: Lines of metrics after the first iteration.
      parent: `[N, L]`, member whose state each member had at the beginning of a line.
      ancestor: `[N, L]`, member that each final member descends from, in each line.
      scores: `[N, E]`, evaluations of each final member and its ancestors.
      values: `[N, L]`, settings of each member, by flag name.
    """

    lines: list[Row]
    parent: npt.NDArray[np.int64]
    ancestor: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    values: dict[str, npt.NDArray[np.float64]]

    def lineages(self, seeds: int) -> list[Json]:
        """Returns the entry `lineage` of each draw in `sweep.json`; lists lead with the seeds."""
        steps = [line["step"] for line in self.lines]
        return [
            {
                "draw": i // seeds,
                "steps": steps,
                "parents": (self.parent[i : i + seeds] // seeds).tolist(),
                "values": {name: x[i : i + seeds].tolist() for name, x in self.values.items()},
            }
            for i in range(0, len(self.parent), seeds)
        ]


def read_history(path: Path, score: str, space: Space) -> History:
    """Reads the history of a population from the file of metrics of its program."""

    def read(name: str) -> npt.NDArray[np.float64]:
        return np.array([line[name] for line in lines if name in line], np.float64).T

    lines = [row for row in metrics.read(path) if PARENT in row]
    evaluated = [i for i, line in enumerate(lines) if score in line]
    parent = read(PARENT).astype(int)
    ancestor = trace(parent)
    scores = np.take_along_axis(read(score), ancestor[:, evaluated], axis=0)
    names = [SECTION + name for name in (*space.bounds, *space.choices)]
    return History(lines, parent, ancestor, scores, {x: read(SETTING + x) for x in names})


def trace(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the ancestor `[N, L]` of each final member in each line.

    Example:
      >>> trace(np.array([[0, 0, 1], [1, 0, 1]]))[0].tolist()  # 0 copied 1, which had copied 0
      [0, 1, 0]
    """
    ancestor, now = np.empty_like(parent), np.arange(len(parent))
    for line in reversed(range(parent.shape[1])):
        ancestor[:, line], now = now, parent[now, line]
    return ancestor


def save_best(plan: Plan, job: TrainJob, state: TrainState, history: History, best: int) -> None:
    """Writes the run of the best member, which `run.load` reads, and the curves of its population.

    Args:
      plan: Population of the sweep.
      job: Job of the population.
      state: Final state of the population, leaves `[C·S, …]`.
      history: History of the population.
      best: Index of the best member in the state.
    """
    score, rows = job.evaluation.score, list[Row]()
    for line, at in zip(history.lines, history.ancestor[best], strict=True):
        own = {x: np.array(y, np.float64)[[at]] for x, y in line.items() if isinstance(y, list)}
        rows.append({**line, **metrics.by_seed(own)})
    values = {flag: float(x[best, -1]) for flag, x in history.values.items()}
    alone = state.with_frozen(None)._replace(opt_state=state.opt_state[1][1])
    alone = jax.tree.map(lambda x: x[best : best + 1], alone)
    stored = plan.settings | values
    with folder.claim(stored["out"], overwrite=True) as out:
        folder.write_settings(out, stored)
        metrics.truncate(out / "metrics.jsonl", -1)
        metrics.append(out / "metrics.jsonl", *rows)
        folder.write_json(out / "summary.json", metrics.summary(rows, stored, score=score))
        for kind in ("latest", "best"):
            with checkpoint.Store(out / "checkpoints" / kind, keep=1) as store:
                store.save(job.length.iterations, alone)
    panels = [
        Panel(
            history.lines,
            [Series(metric, "members"), Series(metric, "best and its ancestors", rows)],
            "",
            job.display.unit,
            label,
            log=metric != score,
        )
        for label, metric in [
            (metrics.axis(score), score),
            *((flag, SETTING + flag) for flag in values),
        ]
    ]
    picture = out.parents[1] / "curves.png"
    with plotting.report_failure(picture):
        plotting.save_panels(panels, picture)
