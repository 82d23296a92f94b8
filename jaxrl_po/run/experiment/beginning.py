"""`--init_from` of a control run: the parameters with which every seed begins."""

import jax

from jaxrl_po.control import statistics
from jaxrl_po.run.devices.seeds import of_seed
from jaxrl_po.run.experiment import earlier, flags
from jaxrl_po.run.experiment.assembly import Script
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.types import ActorCritic, CollectorState, Problem, PyTree


def begun(script: Script, problem: Problem, run: str) -> Problem:
    """The problem whose parameters, and statistics of observations, are those a run ended with.

    A critic of other shapes, or where that run has none, begins afresh.

    Args:
      script: that made the run.
      problem: of the run that begins.
      run: the folder.

    Raises:
      UsageError: the policy has other shapes, or only one of them normalises observations.
    """
    records = earlier.read(script, "init_from", run)
    saved = of_seed(earlier.state(script, records, "init_from", run, "latest")[2])
    fresh, collector = jax.eval_shape(problem.init, jax.random.key(0))
    its, ours = (_shapes(params.policy) for params in (saved.params, fresh))
    for name in sorted(its.keys() | ours.keys()):
        if its.get(name) != ours.get(name):
            raise UsageError(
                f"--init_from={run}: its policy has {its.get(name, 'nothing')} at {name}, and this "
                f"one {ours.get(name, 'nothing')}: give --env and --network of that run"
            )
    kept = statistics.OBSERVATION_STATISTICS
    if (kept in saved.collector.replicated) != (kept in collector.replicated):
        was = flags.shown(kept in saved.collector.replicated)
        raise UsageError(
            f"--problem.normalize_observations must be {was}, as in the run in --init_from={run}"
        )
    of_run = {kept: saved.collector.replicated[kept]} if kept in collector.replicated else {}
    same_critic = _shapes(saved.params.value) == _shapes(fresh.value)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        value = saved.params.value if same_critic else params.value
        begins = params._replace(policy=saved.params.policy, value=value)
        return begins, collector._replace(replicated={**collector.replicated, **of_run})

    return problem._replace(init=init)


def _shapes(params: PyTree) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}
