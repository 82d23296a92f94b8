"""Population-based training in a sweep: for each seed, the draws are the members of a population.

An exploit is part of the program of an iteration. Lines of metrics end where exploits come, so that
each line has the settings and the parent of one stretch of training.
"""

import dataclasses
import functools
from collections.abc import Sequence
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
from jaxrl_po.run.experiment import search_space, settings
from jaxrl_po.run.experiment.prepare import SUCCESS, prepare
from jaxrl_po.run.experiment.search_space import BEST, EVALUATION, Search, Sweep, SweepSpec
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.figures.plotting import Lines
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.store import checkpoint, folder, metrics
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, Row, TrainState

PARENT, SETTING = "population/parent", "population/"
SECTION = "config."  # section of the settings that are data of the training state


class Plan(NamedTuple):
    """Population of a sweep.

    Attributes:
      space: Values that the settings may take, by name of the method's field.
      given: Flags of the run of the best member, without the settings in `space`.
    """

    space: Space
    given: Json


class Exploits(NamedTuple):
    """Entry in `opt_state` of a population, leaves `[N]`.

    Attributes:
      score: Training score, pooled since the last exploit.
      parent: Member whose state each member had after the last exploit.
    """

    score: Mean
    parent: jax.Array


def plan(domain: Domain[Any], spec: SweepSpec, first: Values) -> Plan:
    """Returns the population of a sweep; `first` holds the values of one of its members.

    Raises:
      ConfigError: A flag has a grid, or a draw of another section or of a static field; or an end
        of a draw is no valid value.
    """
    made = spec.settings(domain, first)
    numbers = {
        f"{SECTION}{x.name}"
        for x in dataclasses.fields(made.config.method)
        if not setting_of(x).static
    }
    ties = {name: values[0][1:] for name, values in spec.swept.items()}
    for name, values in spec.swept.items():
        if values[1:] or not values[0].startswith(search_space.TIE):
            raise ConfigError(name, "must be a draw with exploit_every, e.g. choice(a,b,c)")
    for name in (*spec.drawn, *ties):
        if name not in numbers:
            raise ConfigError(
                name, "must have one value with exploit_every: another value is another program"
            )
    bounds, choices = dict[str, tuple[float, float]](), dict[str, list[float]]()
    for name, written in spec.drawn.items():
        kind, values = search_space.parse_draw(name, written)
        field = name.removeprefix(SECTION)
        if kind == "choice":
            choices[field] = [float(x) for x in values]
        else:
            bounds[field] = float(values[0]), float(values[1])
        for x in values:
            if float(x):  # no factor makes a number 0
                spec.settings(domain, {**first, name: x})
    tied = {x.removeprefix(SECTION): y.removeprefix(SECTION) for x, y in ties.items()}
    of_search = {x.name for x in dataclasses.fields(Search)}
    given = {name: x for name, x in {**spec.tuned, **spec.flags}.items() if name not in of_search}
    given |= {"out": str(Path(spec.flags["out"]) / BEST), "overwrite": True, "resume": False}
    given |= {"seeds": 1, "devices": "auto", "mesh": "", "log_every": spec.flags["exploit_every"]}
    return Plan(Space(bounds, choices, tied), given)


def require_population(job: TrainJob, options: Sweep) -> None:
    """Raises ConfigError if the members of a job cannot be compared within its program."""
    if job.host.rollouts is not None:
        raise ConfigError("exploit_every", "must be 0 with an environment on the host")
    if options.exploit_by == EVALUATION and job.evaluation.score_evaluation is not None:
        raise ConfigError("exploit_by", "must be training: the host computes this evaluation")
    if options.exploit_every >= job.length.iterations:
        raise ConfigError(
            "exploit_every",
            f"must be below {job.length.iterations}, the iterations of total_steps, got "
            f"{options.exploit_every}",
        )


def with_exploits(job: TrainJob, options: Sweep, space: Space) -> TrainJob:
    """Returns the job of a population whose members replace each other.

    Before every iteration `k · exploit_every`, k ≥ 1, the draws of each seed are ranked by their
    score since the last exploit, see `population.exploit`. A member without a score ranks lowest.

    Args:
      job: Job of C·S runs whose settings are data of the state, seeds innermost.
      options: Options of the sweep.
      space: Values that the settings may take.
    """
    learner, size, seeds = job.learner, job.num_seeds, options.seeds
    shown = {x.metric for x in job.display.curves}
    success = next(name for name in SUCCESS if name in shown)
    names = [*space.bounds, *space.choices, *space.ties]
    none = Mean(jnp.zeros(size), jnp.zeros(size))

    def begin(state: TrainState) -> TrainState:
        own = jnp.arange(size, dtype=jnp.int32) // seeds
        return state._replace(opt_state=(Exploits(none, own), state.opt_state))

    def by_seed(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, seeds, *x.shape[1:]), tree)

    @functools.partial(jax.vmap, in_axes=(1, 1, 1, 0), out_axes=1)
    def of_seeds(state: TrainState, values: Values, score: jax.Array, key: jax.Array) -> PyTree:
        return population.exploit(state, values, score, space, key)

    def exploit(state: TrainState, frozen: PyTree) -> TrainState:
        since, (config, opt_state) = state.opt_state
        score = since.score.metric()
        if options.exploit_by == EVALUATION:
            score = job.evaluate(state.with_frozen(frozen))[job.evaluation.score]
        own, of_exploit = jnp.moveaxis(jax.vmap(jax.random.split)(state.key), 1, 0)
        state = state._replace(opt_state=opt_state, key=own)
        values = {name: getattr(config, name) for name in names}
        after = of_seeds(*by_seed((state, values, score)), of_exploit[:seeds])
        state, values, parent = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), after)
        config = dataclasses.replace(config, **values)
        return state._replace(opt_state=(Exploits(none, parent), (config, state.opt_state)))

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        frozen, step = state.params.frozen, state.step[0]
        due = (step > 0) & (step % options.exploit_every == 0)
        state = jax.lax.cond(
            due, lambda x: exploit(x, frozen), lambda x: x, state.with_frozen(None)
        )
        since, own = state.opt_state
        state, batch = learner.sample(state.with_frozen(frozen)._replace(opt_state=own))
        return state._replace(opt_state=(since, state.opt_state)), batch

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        since, own = state.opt_state
        state, measured = learner.update(state._replace(opt_state=own), batch)
        since = since._replace(score=since.score + measured[success])
        noted = {SETTING + name: getattr(own[0], name) for name in names}
        noted[PARENT] = since.parent.astype(jnp.float32)
        measured |= {name: Mean(x, jnp.ones(size)) for name, x in noted.items()}
        return state._replace(opt_state=(since, state.opt_state)), measured

    warm, init = job.warm, learner.init
    if warm is not None:
        of_fit = warm.init
        warm = warm._replace(init=lambda pair: begin(of_fit(pair)))
    together = Learner(jax.jit(lambda start: begin(init(start))), jax.jit(sample), jax.jit(update))
    return dataclasses.replace(job, learner=together, warm=warm)


class History(NamedTuple):
    """Scores and lineage of a population of C members and S seeds over L lines.

    Attributes:
      lines: Lines of metrics after the first iteration.
      parent: `[C, S, L]`, member whose state each member had at the beginning of a line.
      ancestor: `[C, S, L]`, member that had the state of each final member's lineage in a line.
      values: `[C, S, L]`, settings in each line, by name.
      scores: `[C, S, E]`, evaluations of each final member and its ancestors.
    """

    lines: list[Row]
    parent: npt.NDArray[np.int64]
    ancestor: npt.NDArray[np.int64]
    values: dict[str, npt.NDArray[np.float64]]
    scores: npt.NDArray[np.float64]

    def lineages(self) -> list[Json]:
        """Returns the entry `lineage` of each member in `sweep.json`."""
        steps = [line["step"] for line in self.lines]
        return [
            {
                "member": i,
                "steps": steps,
                "parents": self.parent[i].tolist(),
                "values": {SECTION + name: x[i].tolist() for name, x in self.values.items()},
            }
            for i in range(len(self.parent))
        ]


def read_history(path: Path, seeds: int, score: str) -> History:
    """Reads the history of a population from the file of metrics of its program."""
    lines = [row for row in metrics.read(path) if PARENT in row]
    evaluated = [i for i, row in enumerate(lines) if score in row]

    def read(name: str, which: Sequence[int]) -> npt.NDArray[np.float64]:
        found = np.array([lines[i][name] for i in which], np.float64).T
        return found.reshape(-1, seeds, len(which))

    every = range(len(lines))
    parent = read(PARENT, every).astype(int)
    names = [x for x in lines[0] if x.startswith(SETTING) and isinstance(lines[0][x], list)]
    values = {x.removeprefix(SETTING): read(x, every) for x in names if x != PARENT}
    ancestor = trace(parent)
    scores = np.take_along_axis(read(score, evaluated), ancestor[:, :, evaluated], 0)
    return History(lines, parent, ancestor, values, scores)


def trace(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the ancestor `[C, S, L]` of each final member in each line.

    Example:
      >>> trace(np.array([[[0, 0, 1]], [[1, 0, 1]]]))[0, 0].tolist()  # 0 copied 1, which copied 0
      [0, 1, 0]
    """
    members, seeds, lines = parent.shape
    ancestor = np.empty_like(parent)
    now = np.tile(np.arange(members)[:, None], seeds)
    for line in reversed(range(lines)):
        ancestor[:, :, line] = now
        now = parent[now, np.arange(seeds), line]
    return ancestor


def save_best(
    domain: Domain[Any],
    plan: Plan,
    job: TrainJob,
    state: TrainState,
    history: History,
    index: int,
) -> None:
    """Writes the run of one member of one seed to a folder, which `run.load` reads.

    Args:
      domain: Domain of the run.
      plan: Population of the sweep.
      job: Job of the population.
      state: Final state of the population, leaves `[C·S, …]`.
      history: History of the population.
      index: Index of the member in the state.
    """
    seeds = history.scores.shape[1]
    member, seed = divmod(index, seeds)
    values = {SECTION + x: float(y[member, seed, -1]) for x, y in history.values.items()}
    settled = prepare(domain, settings.merge_settings(domain, plan.given | values))
    stored, rows, score = settled.output.settings, list[Row](), job.evaluation.score
    for line, ancestor in zip(history.lines, history.ancestor[member, seed], strict=True):
        at = slice(ancestor * seeds + seed, ancestor * seeds + seed + 1)
        own = {x: np.array(y, np.float64)[at] for x, y in line.items() if isinstance(y, list)}
        rows.append({**line, **metrics.by_seed(own)})
    alone = state.with_frozen(None)._replace(opt_state=state.opt_state[1][1])
    alone = jax.tree.map(lambda x: x[index : index + 1], alone)
    with folder.claim(plan.given["out"], overwrite=True) as out:
        folder.write_settings(out, stored)
        metrics.truncate(out / "metrics.jsonl", -1)
        metrics.append(out / "metrics.jsonl", *rows)
        folder.write_json(out / "summary.json", metrics.summary(rows, stored, score=score))
        for kind in ("latest", "best"):
            with checkpoint.Store(out / "checkpoints" / kind, keep=1) as store:
                store.save(job.length.iterations, alone)


def panels(members: Sequence[Json], index: int, score: str) -> list[Lines]:
    """Returns the curves of the scores and the settings of a population.

    Args:
      members: Rows of `sweep.json` in the order of the members.
      index: Index of the best member in the state of the population.
      score: Label of the score.
    """
    scores = np.array([row["scores"] for row in members], np.float64)
    lineages = [row["lineage"] for row in members]
    parent = np.array([x["parents"] for x in lineages])
    member, seed = divmod(index, parent.shape[1])
    ancestor, every = trace(parent)[member, seed], np.arange(parent.shape[2])
    found = [Lines(score, members[0]["steps"], np.concatenate(scores), scores[member, seed])]
    for name in lineages[0]["values"]:
        values = np.array([x["values"][name] for x in lineages], np.float64)
        best = values[ancestor, seed, every]
        found.append(Lines(name, lineages[0]["steps"], np.concatenate(values), best))
    return found
