"""Planted mistakes in random numbers and their keys."""

from wrong import Wrong

WRONG = [
    Wrong(
        "one key for action and environment",
        "control.unroll",
        "step_keys[:, 1], envs.state",
        "step_keys[:, 0], envs.state",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "one key for action and environment in an evaluation",
        "control.unroll",
        "step_keys[:, 1], playing.state",
        "step_keys[:, 0], playing.state",
        ("test_random_numbers.py::test_nor_in_an_evaluation_that_samples",),
    ),
    Wrong(
        "one key for prompt and completion",
        "language.problem",
        "keys[:, 1]",
        "keys[:, 0]",
        ("test_random_numbers.py::test_the_noise_of_completions_is_not_that_of_prompts",),
    ),
    Wrong(
        "one key for prompt and completion in an evaluation",
        "language.evaluation",
        "keys[:, 1]",
        "keys[:, 0]",
        ("test_random_numbers.py::test_the_noise_of_completions_is_not_that_of_prompts",),
    ),
    Wrong(
        "a warm start continues for every seed until the last one reaches the target accuracy",
        "language.warm_start",
        "return jax.lax.cond(fit.accuracy < settings.accuracy, train, lambda fit: fit, fit)",
        "return train(fit)",
        ("test_warm_start.py::test_every_seed_stops_where_it_would_stop_alone",),
    ),
    Wrong(
        "the same shuffle in every epoch",
        "updates",
        "order(jax.random.split(key, num_epochs))",
        "order(jnp.stack([key] * num_epochs))",
        ("test_random_numbers.py::test_every_epoch_is_shuffled_anew_and_deals_out_every_row",),
    ),
    Wrong(
        "a vine without common random numbers in its first step",
        "control.vine",
        "unroll.row_keys(first_key, state_index)",
        "unroll.row_keys(first_key, jnp.arange(state_index.shape[0]))",
        (
            "test_random_numbers.py::test_the_branches_of_a_state_share_their_noise_and_states_do_not",
        ),
    ),
    Wrong(
        "a vine without common random numbers after it",
        "control.vine",
        "EnvState(state_index, state,",
        "EnvState(jnp.arange(state_index.shape[0], dtype=jnp.int32), state,",
        (
            "test_random_numbers.py::test_the_branches_of_a_state_share_their_noise_and_states_do_not",
        ),
    ),
    Wrong(
        "the key does not advance in an update",
        "learner",
        "        state, key = next_key(state)\n        state, metrics",
        "        _, key = next_key(state)\n        state, metrics",
        ("test_random_numbers.py::test_no_key_is_used_twice",),
    ),
    Wrong(
        "the key does not advance at all",
        "learner",
        "return state._replace(key=following), key",
        "return state, key",
        ("test_random_numbers.py::test_no_two_iterations_sample_the_same",),
    ),
    Wrong(
        "every step of an episode with the same noise",
        "control.unroll",
        "jax.random.fold_in(key, t)",
        "jax.random.fold_in(key, 0 * t)",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "every environment with the same noise",
        "control.unroll",
        "keys = row_keys(key, envs.number)",
        "keys = row_keys(key, 0 * envs.number)",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "dynamic sampling generates one batch again and again",
        "dynamic_sampling",
        "jax.random.fold_in(key, fill.rounds)",
        "key",
        ("test_dynamic_sampling.py::test_the_first_informative_groups_are_kept_in_order",),
    ),
    Wrong(
        "raw keys of prompts lose their axis",
        "language.sampling",
        ".reshape(-1, *keys.shape[1:])",
        ".reshape(-1)",
        ("test_random_numbers.py::test_raw_keys_draw_the_tokens_of_typed_ones",),
    ),
    Wrong(
        "a token is drawn with typed keys alone",
        "language.sampling",
        "jnp.broadcast_to(t, keys.shape[:1])",
        "jnp.broadcast_to(t, keys.shape)",
        ("test_random_numbers.py::test_a_step_keeps_a_raw_key[ppo-reference-learned]",),
    ),
    Wrong(
        "a dialogue is held with typed keys alone",
        "language.conversation",
        "jnp.zeros((row_keys.shape[0], columns), bool)",
        "jnp.zeros((*row_keys.shape, columns), bool)",
        ("test_random_numbers.py::test_warm_start_and_evaluation_take_raw_keys[dialogue]",),
    ),
]
