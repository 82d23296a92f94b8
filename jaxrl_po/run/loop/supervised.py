"""The supervised warm start of a run, in steps that the host starts, shows and can end."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_po.language import Transformer, lora, warm_start
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.tasks.types import reading
from jaxrl_po.language.warm_start import BETWEEN, Fit, WarmStart
from jaxrl_po.run.devices import processes
from jaxrl_po.run.loop.progress import clock
from jaxrl_po.types import Learner, PyTree, TrainState


class Warm(NamedTuple):
    """The warm start in a learner's `init`, in parts, so that the host can show and interrupt it.

    Attributes:
      settings: of the warm start.
      begin: `start -> fit`, before the first step; `start` is the argument of `Learner.init`.
      advance: `(fit, done, given) -> fit`, see `warm_start.advance`; `given` is `Job.given`.
      init: `(start, params) -> state` takes a pair: what `Learner.init` makes of the start where
        the warm start gives these parameters.
    """

    settings: WarmStart
    begin: Callable[[Any], Fit]
    advance: Callable[..., Fit]
    init: Callable[[Any], TrainState]


def in_parts(
    make: Callable[[PyTree], Learner], settings: WarmStart, task: TaskLike, policy: Transformer
) -> Warm | None:
    """The warm start in the `init` of a learner, of one seed; None without one.

    Args:
      make: the learner, from the argument `warm` of `make_problem`.
      settings: of the warm start.
      task: where demonstrations come from.
      policy: the model.
    """
    if not settings.steps:
        return None

    def begin(start: PyTree) -> Fit:
        fits = []

        def hold(params: PyTree, key: jax.Array) -> PyTree:
            fits.append(warm_start.begin(settings, params, key))
            return params

        # Traced for what reaches the warm start; the compiler drops what is made of its result.
        make(hold).init(start)
        return fits[0]

    def init(pair: tuple[PyTree, PyTree]) -> TrainState:
        start, params = pair
        return make(lambda *_: params).init(start)

    def advance(fit: Fit, done: jax.Array, given: PyTree) -> Fit:
        model = policy if policy.lora is None else lora.over(policy, given)
        source = task if isinstance(task, Dialogue) else reading(task, given)
        return warm_start.advance(model, source, settings, fit, done)

    return Warm(settings, begin, advance, init)


def run(
    warm: Warm,
    start: PyTree,
    wait_for: Callable[..., tuple[PyTree, float]],
    show: Callable[[str, str, str], None],
    leave_if_interrupted: Callable[[], None],
    *,
    given: PyTree = None,
) -> PyTree:
    """The policy's parameters after the warm start.

    Args:
      warm: compiled.
      start: see `Job.start`.
      wait_for: calls a function with arguments; returns its result and its seconds.
      show: shows a phase, how far it is and the time left; see `Reporter.phase`.
      leave_if_interrupted: called after every `BETWEEN` steps.
      given: see `Job.given`.
    """
    settings, done, begun = warm.settings, 0, time.perf_counter()
    fit, _ = wait_for(warm.begin, start)
    accuracy = processes.whole(fit.accuracy)
    while warm_start.unfinished(settings, done, accuracy).any():
        fit, _ = wait_for(warm.advance, fit, np.int32(done), given)
        leave_if_interrupted()
        done, accuracy = min(done + BETWEEN, settings.steps), processes.whole(fit.accuracy)
        each = max(time.perf_counter() - begun, 0.0) / done  # a clock may jump
        detail, left = f"step {done:,}/{settings.steps:,}", clock(each * (settings.steps - done))
        if settings.accuracy < 1.0:
            # The mean over seeds; the warm start may end before its last step.
            detail, left = f"{detail}, accuracy {accuracy.mean():.2f}", f"< {left}"
        show("warm start", detail, f"{left} left")
    return fit.params
