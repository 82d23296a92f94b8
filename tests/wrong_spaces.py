"""Wrong programs of structured observations, masks, squashed actions, memory and cheap resets."""

from wrong import Wrong

WRONG = [
    Wrong(
        "illegal actions are made unlikely in place of impossible",
        "distributions",
        "jnp.where(kept, _wide(distribution.logits), -jnp.inf)",
        "jnp.where(kept, _wide(distribution.logits), -5.0)",
        ("test_distributions.py::test_an_illegal_action_has_probability_zero_everywhere",),
    ),
    Wrong(
        "the mask does not reach the policy",
        "control.actor",
        "return distributions.allow(distribution, inputs.legal)",
        "return distribution",
        ("test_spaces.py::test_every_method_keeps_to_the_legal_actions[jaxrl_po.algorithms.ppo]",),
    ),
    Wrong(
        "a squashed density without the slope of tanh",
        "distributions",
        "self.gaussian().log_prob(action) - jnp.sum(_log_slope(_wide(action)), axis=-1)",
        "self.gaussian().log_prob(action)",
        ("test_distributions.py::test_density_of_a_squashed_gaussian_integrates_to_one[0.0-0.0]",),
    ),
    Wrong(
        "the entropy of u for that of tanh(u)",
        "distributions",
        "return self.gaussian().entropy() + jnp.sum(slope, axis=-1)",
        "return self.gaussian().entropy()",
        ("test_distributions.py::test_density_of_a_squashed_gaussian_integrates_to_one[0.0-0.0]",),
    ),
    Wrong(
        "u is played and clipped in place of tanh(u)",
        "control.actor",
        "jnp.tanh(action) if isinstance(distribution, TanhGaussian) else action",
        "action",
        ("test_spaces.py::test_a_squashed_policy_is_evaluated_by_its_greedy_action",),
    ),
    Wrong(
        "the policy sees what is privileged",
        "control.spaces",
        "policy = {key: x for key, x in seen.items() if key != PRIVILEGED}",
        "policy = seen",
        ("test_spaces.py::test_a_dictionary_is_read_by_its_meaning",),
    ),
    Wrong(
        "memory survives the end of an episode while acting",
        "control.unroll",
        "memory=forget(memory, ~running)",
        "memory=memory",
        ("test_memory.py::test_what_is_replayed_is_what_acted",),
    ),
    Wrong(
        "memory survives the end of an episode while training",
        "control.networks",
        "cell(jnp.where(begins[:, None], 0.0, memory), features)",
        "cell(memory, features)",
        ("test_memory.py::test_no_gradient_passes_the_end_of_an_episode",),
    ),
    Wrong(
        "an episode begins one step late",
        "control.problem",
        "jnp.pad(ended[:, :-1], ((0, 0), (1, 0)))",
        "jnp.pad(ended[:, :-2], ((0, 0), (2, 0)))",
        ("test_memory.py::test_what_is_replayed_is_what_acted",),
    ),
    Wrong(
        "every segment begins with an empty memory",
        "control.problem",
        "Sequences(seen, begins, before.memory, critic_memory)",
        "Sequences(seen, begins, 0.0 * before.memory, critic_memory)",
        ("test_memory.py::test_what_is_replayed_is_what_acted",),
    ),
    Wrong(
        "the critic's memory survives the end of an episode",
        "control.problem",
        "after = unroll.forget(after, ended[:, -1])",
        "after = unroll.forget(after, ended[:, -1] & False)",
        ("test_memory.py::test_the_memories_of_a_batch_follow_those_of_the_batch_before",),
    ),
    Wrong(
        "the next value with the memory before the step",
        "control.actor",
        "after = memories.reshape(-1, memories.shape[-1])",
        (
            "after = jnp.concatenate([memory[:, None], memories[:, :-1]], axis=1)"
            ".reshape(-1, memories.shape[-1])"
        ),
        ("test_memory.py::test_the_next_value_is_seen_with_the_memory_before_the_reset",),
    ),
    Wrong(
        "on the host, memory survives the end of an episode",
        "control.recorded",
        "begins = jnp.pad(~mask[:, :-1], ((0, 0), (1, 0)))",
        "begins = jnp.zeros_like(mask)",
        ("test_memory.py::test_a_host_environment_replays_what_acted",),
    ),
    Wrong(
        "no new starting states are drawn before they are needed",
        "control.unroll",
        "envs._replace(state=jax.vmap(refresh)(draw, envs.state))",
        "envs",
        ("test_episodes.py::test_a_start_is_drawn_once_in_an_interval_where_episodes_are_long",),
    ),
    Wrong(
        "the same starting states in every window of a rollout",
        "control.unroll",
        "jax.random.fold_in(key, times[0] + num_steps)",
        "jax.random.fold_in(key, num_steps)",
        ("test_episodes.py::test_no_two_episodes_begin_with_the_same_start[6]",),
    ),
    Wrong(
        "the compiler draws a start in every step",
        "control.adapters.episodes",
        "return jnp.bool_(False), jax.random.fold_in(key, 1), new(key)",
        "return jnp.bool_(False), key, new(key)",
        ("test_episodes.py::test_a_step_that_ends_no_episode_draws_no_start",),
    ),
    Wrong(
        "a start serves every episode that ends before the next is drawn",
        "control.adapters.episodes",
        "where_ended(ended & running.used, begin, key, running.start)",
        "where_ended(ended & False, begin, key, running.start)",
        ("test_episodes.py::test_the_law_of_the_starts_is_that_of_reset[16]",),
    ),
    Wrong(
        "an episode that ends by itself at its limit counts as cut",
        "control.adapters.episodes",
        "truncated = (length >= max_steps) & ~terminated",
        "truncated = length >= max_steps",
        ("test_episodes.py::test_ends_by_itself_and_by_the_limit_are_told_apart[1]",),
    ),
    Wrong(
        "the first observation of the next episode for the final one",
        "control.adapters.episodes",
        "Transition(observation, reward, terminated, truncated, final)",
        "Transition(observation, reward, terminated, truncated, observation)",
        ("test_episodes.py::test_ends_by_itself_and_by_the_limit_are_told_apart[4]",),
    ),
    Wrong(
        "an infinite observation is clipped to a number and used",
        "control.problem",
        "jnp.where(seen | ~used, reward, jnp.nan)",
        "reward",
        ("test_control.py::test_what_is_not_finite_is_counted_and_its_update_skipped",),
    ),
]
