"""Adds a frozen teacher, which scores every action that the policy takes."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_po import learner
from jaxrl_po.config import ConfigError
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem

TEACHER = "teacher"  # entry of `ActorCritic.frozen` with the teacher's parameters

Apply = Callable[[ActorCritic, Any], tuple[Any, jax.Array]]
"""`(params, inputs) -> (distribution, value)`, has the form of `Problem.apply`."""


def with_teacher(
    problem: Problem, params: ActorCritic, apply: Apply | None = None, *, num_parts: int = 1
) -> Problem:
    """Returns the problem whose batches have a column `teacher_log_prob`, for `distillation`.

    Args:
      problem: problem of the student.
      params: parameters of the teacher, without a critic.
      apply: `(params, inputs) -> (distribution, value)` of the teacher; None stands for the
        student's networks. The policy of another problem with the same task, tokenizer and token
        budget can be a teacher of another size.
      num_parts: number of parts of a batch, see `learner.make`.

    Returns:
      `Problem` with a teacher.

    Raises:
      ConfigError: the teacher has another number of actions than the policy.

    Example:
      `with_teacher(problem, large_params, language.make_problem(task, large).apply)`
    """
    taught = problem if apply is None else problem._replace(apply=apply)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        student, collector = problem.init(key)
        return student._replace(frozen={**(student.frozen or {}), TEACHER: params}), collector

    def collect(
        student: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        teacher = student.frozen[TEACHER]
        collector, batch = problem.collect(student, collector, key)
        mine, its = (
            _options(one, params, batch.inputs)
            for one, params in ((problem, student), (taught, teacher))
        )
        if mine != its:
            raise ConfigError(
                "teacher",
                f"must have the {mine} actions of the policy (for tokens its vocabulary), got "
                f"{its}",
            )
        log_prob = learner.log_prob(taught, teacher, batch, num_parts=num_parts)
        return collector, batch._replace(columns={**batch.columns, "teacher_log_prob": log_prob})

    return problem._replace(init=init, collect=collect)


def _options(problem: Problem, params: ActorCritic, inputs: Any) -> int | None:
    """Returns the number of actions; None for actions that are not discrete."""

    def logits() -> Any:
        return getattr(problem.apply(params._replace(value=None), inputs)[0], "logits", None)

    shape = jax.eval_shape(logits)
    return None if shape is None else int(shape.shape[-1])
