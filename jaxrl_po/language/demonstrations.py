"""Defines demonstrations as a `Problem`: prompts of the train split, each with a correct answer."""

import functools
from collections.abc import Callable, Mapping

import jax

from jaxrl_po import masked, variables
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, ConfigError, common, record
from jaxrl_po.language import cross_entropy, lora, sampling
from jaxrl_po.language.dialogue import Dialogue
from jaxrl_po.language.mismatch import SAMPLER, Sampler
from jaxrl_po.language.networks import make_networks, prompt_keys, shorten_after
from jaxrl_po.language.problem import as_token_problem
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.tasks.types import Task, held_out, num_asked, reading
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree, Samples

AT_A_TIME = 16  # number of evaluation rows that are computed together, to bound memory


@record
class SupervisedSettings:
    """Sizes of supervised training on demonstrations."""

    num_prompts: int = common.static(
        64, "demonstrations per iteration, over all devices", within=COUNT
    )
    max_new_tokens: int = common.static(
        0,
        "token budget of completions that are shown or asked for later; 0 takes the longest answer",
        unit="tokens",
    )
    group_size = 1  # number of demonstrations per prompt

    @property
    def decoding(self) -> sampling.Decoding:
        """Token budget of sampling, as a `Decoding`."""
        return sampling.Decoding(self.max_new_tokens)


def make_problem(
    task: Task,
    model: Transformer,
    *,
    num_prompts: int = 64,
    initial: PyTree | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a problem whose `collect` draws demonstrations; actions are the answers' tokens.

    The problem is for `algorithms.sft`: the policy is not sampled, so that `log_prob`, `reward` and
    `score` are 0.

    Args:
      task: task that gives prompts and demonstrations.
      model: transformer of the policy.
      num_prompts: number B of demonstrations per iteration, over all devices.
      initial: initial parameters of the policy, see `language.make_problem`; None draws them.
      target: hardware that the program is compiled for; None for `backend.here()`.

    Returns:
      `Problem` whose batches are demonstrations.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.

    Example:
      >>> from jaxrl_po.language.tasks import addition
      >>> task = addition(1)
      >>> model = Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
      >>> problem = make_problem(task, model, num_prompts=2)
      >>> start = jax.jit(problem.init)(jax.random.key(0))
      >>> _, batch = jax.jit(problem.collect)(*start, jax.random.key(1))
      >>> batch.action.shape, batch.mask.all().item()
      ((2, 3), True)
    """
    if isinstance(task, Dialogue):
        raise ConfigError("task", "must not be a dialogue for supervised training")
    settings = SamplingSettings(num_prompts=num_prompts, group_size=1, old_log_prob=SAMPLER)
    networks = make_networks(
        *(task, model, None, settings, task.answer_length, Sampler()),
        initial=initial,
        target=target,
    )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        keys = prompt_keys(collector, key)[:, 0]
        batch = cross_entropy.draw_demonstrations(reading(task, params.frozen), keys)
        length = masked.total(batch.mask.sum(axis=1))
        return collector, batch._replace(metrics={"answer_length": length})

    return as_token_problem(networks, collect, shorten_after(task.prompt_length))


def make_evaluate(
    task: Task, model: Transformer, *, num_prompts: int | None = None
) -> Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, jax.Array]]:
    """Builds `evaluate(params, collector, key) -> {name: [P]}` over held-out demonstrations.

    Args:
      task: task whose held-out split is demonstrated.
      model: transformer of the policy.
      num_prompts: number of prompts P; None for the default of `tasks.types.num_asked`.

    Returns:
      Function whose metric `held_out_loss` is the cross entropy of each answer, nats per token;
      `held_out_log_prob` is the negative of it.
    """
    variables.require_module("model", model)
    asked = num_asked(task, num_prompts)

    def evaluate(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        del collector
        source = reading(task, params.frozen)
        batch = cross_entropy.demonstrate(source, held_out(source, jax.random.split(key, asked)))
        policy, read = lora.over(model, params.frozen), params.variables("policy")
        loss = cross_entropy.make_loss(functools.partial(cross_entropy.token_log_prob, policy))

        def loss_of(row: Samples) -> jax.Array:
            ((mean,), _) = loss(read, jax.tree.map(lambda x: x[None], row))
            return mean.value()

        rows = cross_entropy.to_samples(batch)
        each = jax.lax.map(loss_of, rows, batch_size=min(AT_A_TIME, asked))
        return {"held_out_log_prob": -each, "held_out_loss": each}

    return evaluate
