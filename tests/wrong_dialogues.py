"""Planted mistakes in dialogues."""

from wrong import Wrong

BATCH = "test_dialogues.py::test_a_batch_holds_the_sampled_tokens_as_the_policy_saw_them"
TURNS = "test_dialogues.py::test_rewards_to_go_are_compared_turn_by_turn"

WRONG = [
    Wrong(
        "replies are trained on",
        "language.conversation",
        "0.0), writes, complete, reward)",
        "0.0), writes | reads, complete, reward)",
        (BATCH,),
    ),
    Wrong(
        "the policy reads on behind a reply",
        "language.conversation",
        "reads = turn.read < turn.reply.length",
        "reads = turn.read < dialogue.reply_length * (turn.turns > 0)",
        ("test_dialogues.py::test_what_stands_behind_a_reply_changes_nothing",),
    ),
    Wrong(
        "all rows wait until none reads",
        "language.conversation",
        "writes = ~reads & ~over",
        "writes = ~reads & ~over & ~reads.any()",
        ("test_dialogues.py::test_no_row_waits_for_another",),
    ),
    Wrong(
        "a message does not end at its budget",
        "language.conversation",
        "(ends_here | (written == budget))",
        "ends_here",
        (BATCH,),
    ),
    Wrong(
        "each seed loops by itself",
        "language.sampling",
        "(t < steps) & anywhere(live(rows).sum() > fewer)",
        "(t < steps) & (live(rows).sum() > fewer)",
        ("test_sampled_seeds.py",),
    ),
    Wrong(
        "outputs at the first columns, not at those of the sampled tokens",
        "language.networks",
        "position=inputs.position,",
        "position=None if inputs.position is None else jnp.sort(inputs.position * 0, axis=1),",
        (BATCH,),
    ),
    Wrong(
        "the critic's value of the next column, which may be a reply's",
        "language.dialogues.problem",
        "next_value=jnp.where(is_last, 0.0, jnp.roll(values, -1, axis=1)),",
        "next_value=jnp.where(is_last, 0.0, values),",
        (BATCH,),
    ),
    Wrong(
        "a cut dialogue is not truncated",
        "language.dialogues.problem",
        "truncated=is_last & ~held.ended[:, None],",
        "truncated=is_last & held.ended[:, None],",
        ("test_dialogues.py::test_a_dialogue_that_goes_on_is_cut_and_one_that_is_done_is_not",),
    ),
    Wrong(
        "rewards of a turn without those that follow",
        "group_advantages",
        "to_go, count = sums.value, has",
        "to_go, count = sums.value - jnp.roll(sums.value, -1, axis=1), has",
        (TURNS,),
    ),
    Wrong(
        "turns that a member does not have count as 0",
        "group_advantages",
        "has = add(mask.astype(jnp.int32), turn) > 0",
        "has = add(mask.astype(jnp.int32), turn) < 2",
        (TURNS,),
    ),
    Wrong(
        "a discount per turn applies where none ends",
        "algorithms.actor_critic",
        "jnp.where(steps.step_end, x, 1.0)",
        "jnp.where(steps.step_end, 1.0, x)",
        ("test_dialogue_runs.py::test_a_discount_per_turn_is_that_of_the_turns",),
    ),
    Wrong(
        "Mastermind counts a symbol twice",
        "language.dialogues.mastermind",
        "return at_place, shared - at_place",
        "return at_place, shared",
        ("test_games.py::test_mastermind_says_what_is_right",),
    ),
]
