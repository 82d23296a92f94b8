"""Builds the parts of a problem that tasks and dialogues share: parameters, policy and critic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import backend, variables
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, check
from jaxrl_po.distributions import Categorical
from jaxrl_po.language import lora
from jaxrl_po.language.checks import (
    check_adapters,
    check_attention,
    check_module,
    check_parameters,
    check_top_k,
    check_vocabulary,
)
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.mismatch import AUTO, SAMPLER, Sampler
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.tasks.types import DATA, Sequences, Task
from jaxrl_po.language.transformer import Transformer, compiled_for, mark_hidden_matrices
from jaxrl_po.language.unembedding import ListedCategorical, Unembedded, next_tokens
from jaxrl_po.language.warm_start import WarmStart, warm_start
from jaxrl_po.lengths import Shorten
from jaxrl_po.types import ActorCritic, CollectorState, PyTree, Samples, undonated

# Entry of the collector's sharded state: index of each prompt over all devices, `[P]`, int32.
PROMPT_NUMBER = "prompt_number"


class GroupedInputs(NamedTuple):
    """Inputs of `apply` for B = P·G rows, group by group, with each prompt stored once.

    Attributes:
      prompt: tokens of the prompts, `[P, L]`, int32, left-padded.
      pad: padding tokens on the left of each prompt, `[P]`, int32.
      tokens: tokens after the prompt, `[B, N]`, int32.
      position: positions of the sampled tokens, `[B, S]`; None if all tokens are sampled, see
        `Sequences`.
      kept: tokens that each token was drawn from, `[B, S, …]`; None for all tokens, see
        `Sequences`.
    """

    prompt: jax.Array
    pad: jax.Array
    tokens: jax.Array
    position: jax.Array | None
    kept: jax.Array | None

    def whole(self) -> Sequences:
        """Returns the rows as `Sequences`, each row with its prompt."""
        group = self.tokens.shape[0] // self.prompt.shape[0]
        prompt, pad = (jnp.repeat(x, group, axis=0) for x in (self.prompt, self.pad))
        tokens = jnp.concatenate([prompt, self.tokens], axis=1)
        return Sequences(tokens, pad, None, self.position, self.kept)


Inputs = Sequences | GroupedInputs
TokenPolicy = Categorical | ListedCategorical | Unembedded


class LanguageNetworks(NamedTuple):
    """Policy and critic, as functions of sequences.

    Attributes:
      model: transformer of the policy, compiled for the target.
      target: hardware that the program is compiled for.
      init: `(key) -> (params, collector)`, see `Problem`.
      apply: `(params, inputs) -> (distribution, values)`, see `Problem`.
      value: `(params, inputs) -> values [B, S]`; zeros without a critic.
      log_prob_matches_sampler: True if `apply` gives the sampler's log-probabilities, see
        `Problem`.
      linearizable: True if `apply` has a forward derivative, see `Problem`.
      hidden_matrices: `(params) -> tree of bool`, marks the hidden matrices; None if unknown, see
        `Problem`.
      grouped: `(inputs) -> inputs`, stores each prompt once per group; None to leave inputs
        unchanged, see `FastPaths`.
      num_completions: number of completions (or dialogues) in one iteration.
    """

    model: Transformer
    target: Target
    init: Callable[[jax.Array], tuple[ActorCritic, CollectorState]]
    apply: Callable[[ActorCritic, Inputs], tuple[TokenPolicy, jax.Array]]
    value: Callable[[ActorCritic, Inputs], jax.Array]
    log_prob_matches_sampler: bool
    linearizable: bool
    hidden_matrices: Callable[[ActorCritic], ActorCritic] | None
    grouped: Callable[[Sequences], Inputs] | None
    num_completions: int


def make_networks(
    source: TaskLike,
    model: Transformer,
    critic: Transformer | None,
    settings: SamplingSettings,
    columns: int,
    sampler: Sampler,
    *,
    initial: PyTree | None = None,
    warm: WarmStart | Callable[[PyTree, jax.Array], PyTree] | None = None,
    target: Target | None = None,
) -> LanguageNetworks:
    """Checks the models against the task or dialogue, and builds the functions of a problem.

    Args:
      source: task or dialogue that gives the prompts.
      model: transformer of the policy.
      critic: transformer with one output, or None for a problem without critic.
      settings: sizes of the problem and settings of its sampling.
      columns: largest number N of tokens after the prompt.
      sampler: differences between the sampling policy and the learner's policy, see
        `mismatch.Sampler`.
      initial: initial parameters of the policy, see `problem.make_problem`.
      warm: supervised warm start, or a function in its place, see `problem.make_problem`.
      target: hardware that the program is compiled for; None for `backend.here()`.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    model, critic = (compiled_for(target, each) for each in (model, critic))
    target, group_size = target or backend.here(), settings.group_size
    check(settings)
    check(sampler)
    check_models(source, model, critic, initial)
    check_top_k(settings.top_k, model)
    for each, name in ((model, "model"), (critic, "critic")):
        check_attention(each, target)
        check_module(source, each, name)
    init = make_init(source, model, critic, initial, warm, num_prompts=settings.num_prompts)

    def after_prompt(inputs: Inputs) -> int:
        """Returns the number of tokens after the prompt: N, or fewer if rows were shortened."""
        if isinstance(inputs, GroupedInputs):
            return inputs.tokens.shape[1]
        return min(columns, inputs.tokens.shape[1] - source.prompt_length)

    def apply(params: ActorCritic, inputs: Inputs) -> tuple[TokenPolicy, jax.Array]:
        # If prompts are processed once per group, the model has one output after the prompt and
        # one output after each token of the completion.
        reading: dict[str, Any] = {"last": after_prompt(inputs)}
        if isinstance(inputs, GroupedInputs):
            reading = {"prompt": inputs.prompt}
        distribution = next_tokens(
            lora.over(model, params.frozen),
            params.variables("policy"),
            inputs.tokens[:, :-1],
            inputs.pad,
            temperature=settings.temperature,
            position=inputs.position,
            kept=inputs.kept,
            **reading,
        )
        return distribution, value(params, inputs)

    def grouped(inputs: Sequences) -> Inputs:
        if inputs.tokens.shape[0] % group_size:
            return inputs
        start = inputs.tokens.shape[1] - after_prompt(inputs)
        prompt, tokens = jnp.split(inputs.tokens, [start], axis=1)
        pad = inputs.pad[::group_size]
        return GroupedInputs(prompt[::group_size], pad, tokens, inputs.position, inputs.kept)

    def value(params: ActorCritic, inputs: Inputs) -> jax.Array:
        if critic is None or params.value is None:
            every = (inputs.tokens.shape[0], after_prompt(inputs))
            return jnp.zeros(every if inputs.position is None else inputs.position.shape)
        last = after_prompt(inputs)
        inputs = inputs.whole() if isinstance(inputs, GroupedInputs) else inputs
        read = params.variables("value")
        values = critic.apply(read, inputs.tokens[:, :-1], inputs.pad, last=last)[0]
        values = values[..., 0]
        if inputs.position is None:
            return values
        return jnp.take_along_axis(values, inputs.position, axis=1)

    # Grouping gains little in models of few blocks, and would change the order of sums.
    deep = isinstance(model, Transformer) and model.scanned
    alike = settings.old_log_prob == AUTO and rounds_alike(model, sampler, target)
    exact = alike or settings.old_log_prob == SAMPLER
    linear = getattr(model, "kernel", None) is None
    grouping = grouped if deep and group_size > 1 else None
    ours = all(type(each) is Transformer for each in (model, critic) if each is not None)
    hidden = hidden_in_both if ours else None
    parts = model, target, init, apply, value, exact, linear, hidden, grouping
    return LanguageNetworks(*parts, settings.num_prompts * group_size)


def hidden_in_both(params: ActorCritic) -> ActorCritic:
    """Marks hidden matrices of policy and critic transformers, for `Problem.hidden_matrices`."""
    value = None if params.value is None else mark_hidden_matrices(params.value)
    return ActorCritic(mark_hidden_matrices(params.policy), value)


def make_init(
    source: TaskLike,
    model: Transformer,
    critic: Transformer | None,
    initial: PyTree | None,
    warm: WarmStart | Callable[[PyTree, jax.Array], PyTree] | None,
    *,
    num_prompts: int,
) -> Callable[[jax.Array], tuple[ActorCritic, CollectorState]]:
    """Builds `Problem.init`; the arguments are the same as in `make_networks`."""
    # a custom module may lack the field for adapters
    adapters: lora.Lora | None = getattr(model, "lora", None)
    if isinstance(warm, WarmStart):
        check(warm)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        policy_key, critic_key, warm_key = jax.random.split(key, 3)
        tokens, pad = jnp.zeros((1, source.prompt_length), jnp.int32), jnp.zeros(1, jnp.int32)
        policy = undonated(initial)
        frozen: dict[str, PyTree] = {}
        if isinstance(source, Task) and source.data is not None:
            frozen[DATA] = jax.tree.map(jnp.array, source.data)
        if initial is None or adapters is not None:
            policy = model.init(policy_key, tokens, pad)
        policy, constants = variables.split(model, policy)
        if adapters is not None:
            assert initial is not None
            policy, frozen[lora.BASE] = {lora.ADAPTERS: policy[lora.ADAPTERS]}, initial[lora.BASE]
        if isinstance(warm, WarmStart):
            over = lora.over(model, frozen, constants)
            policy = warm_start(over, policy, source, warm, warm_key)
        elif warm is not None:
            policy = warm(policy, warm_key)
        value, of_value = None, None
        if critic is not None:
            value, of_value = variables.split(critic, critic.init(critic_key, tokens, pad))
        constants = variables.by_role(constants, of_value)
        return ActorCritic(policy, value, frozen or None, constants), CollectorState(
            {PROMPT_NUMBER: jnp.arange(num_prompts, dtype=jnp.int32)}
        )

    return init


def check_models(
    source: TaskLike, model: Transformer, critic: Transformer | None, initial: PyTree | None
) -> None:
    """Raises ConfigError if models do not fit the task, or parameters do not fit the model."""
    check_vocabulary(source, model)
    check_adapters(model)
    if initial is not None:
        check_parameters(model, initial)
    elif getattr(model, "lora", None) is not None:
        raise ConfigError("initial", "must be given where the model has adapters: it is their base")
    if critic is not None:
        variables.require_module("critic", critic, "vocabulary", "outputs")
        check_vocabulary(source, critic, "critic")
        if critic.outputs != 1:
            raise ConfigError("critic", f"must have outputs = 1, got {critic.outputs}")


def rounds_alike(model: Transformer, sampler: Sampler, target: Target) -> bool:
    """Returns True if a pass over complete sequences gives the sampler's log-probabilities.

    Below float32, or with a fused kernel, the pass with a cache and the pass over complete
    sequences round differently.
    """
    dtype = getattr(model, "dtype", jnp.float32)  # a custom module may lack the field
    whole = jnp.promote_types(dtype, jnp.float32) == dtype and exact_products(target)
    fused = getattr(model, "kernel", None)
    return whole and fused is None and not sampler.differs(model)


def shorten_after(prompt_length: int) -> Shorten:
    """Builds a `lengths.Shorten` for `Sequences` with prompts of L tokens, padding included."""

    def shorten(samples: Samples, steps: int) -> Samples:
        tokens = samples.inputs.tokens[:, : prompt_length + steps]
        cut, kept = jax.tree.map(
            lambda x: x[:, :steps], (samples._replace(inputs=None), samples.inputs.kept)
        )
        return cut._replace(inputs=samples.inputs._replace(tokens=tokens, kept=kept))

    return shorten


def prompt_keys(collector: CollectorState, key: jax.Array) -> jax.Array:
    """Returns two keys per prompt, `[P, 2]`, from the prompt's index over all devices."""
    keys: Any = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))
    pairs: jax.Array = keys(collector.sharded[PROMPT_NUMBER])
    return pairs


def exact_products(target: Target) -> bool:
    """Returns True if float32 matrix products have full precision, not TF32 or bfloat16.

    On accelerators the setting `jax_default_matmul_precision` decides; on a CPU the precision is
    always full.
    """
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return target.on_cpu or precision in ("highest", "float32")
