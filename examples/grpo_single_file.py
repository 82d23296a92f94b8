"""Implements GRPO in one file: a tiny transformer learns addition from a verifiable reward.

    Run: python examples/grpo_single_file.py

The script needs only jax, flax and optax: read it from top to bottom and change anything in it.
Source: Shao et al. 2024 (arXiv:2402.03300). The right answer to the prompt `7+5=` is `12` and EOS.
A few supervised steps make a policy that is sometimes right, also the reference of the KL penalty.
P prompts have G completions each, in adjacent rows, B = P * G; a completion has T tokens.
"""

from collections import namedtuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

NUM_PROMPTS, GROUP_SIZE, NUM_EPOCHS, NUM_MINIBATCHES = 32, 16, 1, 4
EPSILON, BETA = 0.2, 0.04  # the ratio is clipped to 1 ± EPSILON; BETA is the weight of the KL
LEARNING_RATE, MAX_NORM, WIDTH, LAYERS, HEADS = 5e-4, 1.0, 64, 2, 4
PAD, EOS, ZERO, PLUS, EQUALS, VOCABULARY = 0, 1, 2, 12, 13, 14  # ZERO is the first of ten digits
PROMPT, ANSWER = 4, 3  # number of tokens, EOS included


class Transformer(nn.Module):
    """Decoder-only transformer with learnt positions."""

    @nn.compact
    def __call__(self, tokens):
        """Maps tokens `[B, N]` to logits of each next token, `[B, N, V]`."""
        positions = nn.Embed(PROMPT + ANSWER, WIDTH)(jnp.arange(tokens.shape[1])[None])
        x, mask = nn.Embed(VOCABULARY, WIDTH)(tokens) + positions, nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x += nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


network = Transformer()
optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(LEARNING_RATE))
Batch = namedtuple("Batch", "tokens log_prob mask reward")  # [B, PROMPT + T], [B, T], [B, T], [B]


def write_prompts(a, b):
    """Returns the tokens `[B, PROMPT]` of the prompts `a+b=`."""
    a, b = a + ZERO, b + ZERO
    return jnp.stack([a, jnp.full_like(a, PLUS), b, jnp.full_like(a, EQUALS)], axis=1)


def right_answers(prompts):
    """Returns the tokens `[B, T]` of the right answer to each prompt."""
    total = prompts[:, 0] - ZERO + prompts[:, 2] - ZERO
    return jnp.stack([total // 10 + ZERO, total % 10 + ZERO, jnp.full_like(total, EOS)], axis=1)


def completion_log_prob(params, tokens):
    """Computes the log-probabilities `[B, T]` of the tokens after the prompts."""
    logits = network.apply(params, tokens[:, :-1])[:, PROMPT - 1 :]
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, PROMPT:])


def sample(params, prompts, keys, greedy=False):
    """Completes `prompts` `[B, PROMPT]` with `keys` `[T, B]`, and verifies the answers."""
    tokens, ended, mask = prompts, jnp.zeros(len(prompts), bool), []
    for t in range(ANSWER):  # without a cache of keys and values, each step reads all tokens again
        logits = network.apply(params, tokens)[:, -1]
        action = logits.argmax(1) if greedy else jax.vmap(jax.random.categorical)(keys[t], logits)
        tokens = jnp.concatenate([tokens, jnp.where(ended, PAD, action)[:, None]], axis=1)
        mask.append(~ended)  # trains the answer and EOS, but no token after EOS
        ended |= action == EOS
    reward = jnp.all(tokens[:, PROMPT:] == right_answers(prompts), axis=1).astype(float)
    return Batch(tokens, completion_log_prob(params, tokens), jnp.stack(mask, axis=1), reward)


def group_relative(reward):
    """Computes `(R - mean) / std` within each group, `[P, G]`; 0 if all rewards are equal."""
    centred = reward - reward.mean(axis=1, keepdims=True)
    return centred / (reward.std(axis=1, keepdims=True) + 1e-6)


def grpo_loss(params, batch, advantage, reference_log_prob):
    """Computes clipped surrogate plus KL penalty: a mean over completions of means over tokens."""
    log_prob = completion_log_prob(params, batch.tokens)
    ratio = jnp.exp(log_prob - batch.log_prob)
    clipped = jnp.clip(ratio, 1.0 - EPSILON, 1.0 + EPSILON)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    log_ratio = reference_log_prob - log_prob
    kl = jnp.exp(log_ratio) - log_ratio - 1.0  # k3 estimator of KL(policy || reference)
    objective = jnp.where(batch.mask, surrogate - BETA * kl, 0.0)
    return -jnp.mean(objective.sum(axis=1) / batch.mask.sum(axis=1))


def supervised_loss(params, tokens):
    """Computes the cross-entropy of the answers in `tokens`."""
    return -completion_log_prob(params, tokens).mean()


def adam(loss, params, opt_state, *inputs):
    """Takes one Adam step on `loss(params, *inputs)`."""
    change, opt_state = optimizer.update(jax.grad(loss)(params, *inputs), opt_state)
    return optax.apply_updates(params, change), opt_state


def update(params, opt_state, reference_params, batch, orders):
    """Takes a step for each row of `orders`, the indices of a minibatch among the completions."""
    advantage = group_relative(batch.reward.reshape(-1, GROUP_SIZE)).reshape(-1, 1) * batch.mask
    samples = batch, advantage, completion_log_prob(reference_params, batch.tokens)

    def step(carry, order):
        return adam(grpo_loss, *carry, *jax.tree.map(lambda x: x[order], samples)), None

    return jax.lax.scan(step, (params, opt_state), orders)[0]


def iteration(carry, key):
    """Samples a group for each prompt and updates; returns the share of right answers too."""
    params, opt_state, reference_params = carry
    prompt_key, sample_key, shuffle_key = jax.random.split(key, 3)
    prompts = write_prompts(*jax.random.randint(prompt_key, (2, NUM_PROMPTS), 0, 10))
    prompts = jnp.repeat(prompts, GROUP_SIZE, axis=0)
    batch = sample(params, prompts, jax.random.split(sample_key, (ANSWER, len(prompts))))
    rows = jnp.tile(jnp.arange(len(prompts)), (NUM_EPOCHS, 1))
    orders = jax.random.permutation(shuffle_key, rows, axis=1, independent=True)
    orders = orders.reshape(NUM_EPOCHS * NUM_MINIBATCHES, -1)
    params, opt_state = update(params, opt_state, reference_params, batch, orders)
    return (params, opt_state, reference_params), batch.reward.mean()


def main(iterations=200, supervised_steps=40):
    """Trains the policy and prints the number of right answers."""
    init_key, train_key = jax.random.split(jax.random.key(0))
    prompts = write_prompts(*jnp.divmod(jnp.arange(100), 10))  # all 100 problems
    tokens = jnp.concatenate([prompts, right_answers(prompts)], axis=1)
    params = jax.jit(network.init)(init_key, tokens)
    carry = params, optimizer.init(params)
    imitate = jax.jit(lambda carry: adam(supervised_loss, *carry, tokens))
    for _ in range(supervised_steps):
        carry = imitate(carry)
    carry = *carry, carry[0]  # parameters of the reference policy
    train = jax.jit(lambda carry, keys: jax.lax.scan(iteration, carry, keys))
    greedy = jax.jit(lambda params: sample(params, prompts, None, greedy=True).reward.mean())
    print(f"after the supervised steps {greedy(carry[0]):.2f} of the greedy answers are right")
    for part in jnp.array_split(jnp.arange(iterations), min(10, iterations)):
        carry, sampled = train(carry, jax.random.split(train_key, iterations)[part])
        shares = f"{sampled.mean():.2f} of the sampled, {greedy(carry[0]):.2f} of the greedy"
        print(f"iteration {part[-1] + 1:3d}: {shares} answers are right")


if __name__ == "__main__":
    main()
