"""Planted mistakes in dialogues and rewards on the host."""

from wrong import Wrong

STEPS = "test_conversation_steps.py::test_the_steps_give_the_batch_of_the_one_program"
ENVIRONMENTS, TOOLS, SCORING = "test_environments.py::", "test_tools.py::", "test_scoring.py::"
WORKERS = "test_workers.py::"

WRONG = [
    Wrong(
        "an environment that names a token that the model lacks ends the run",
        "run.host.dialogues.tool_env",
        "for token in tools.foreign:",
        "for token in ():",
        (f"{TOOLS}test_an_environment_may_name_a_token_that_the_model_lacks",),
    ),
    Wrong(
        "rows that wait are fed another token",
        "language.conversation_steps",
        "start = rows.prompt_length + length - count",
        "start = rows.prompt_length + rows.length.max() - count",
        (STEPS,),
    ),
    Wrong(
        "the last token of a message is not read",
        "language.conversation_steps",
        "_feed(model, params, rows, width + 1)",
        "_feed(model, params, rows, width)",
        (STEPS,),
    ),
    Wrong(
        "tokens are drawn by their number within the message",
        "language.conversation_steps",
        "(logits, rows.keys, rows.length, decoding, greedy=greedy)",
        "(logits, rows.keys, rows.length - begun, decoding, greedy=greedy)",
        (STEPS,),
    ),
    Wrong(
        "the reward stands at every message",
        "language.conversation_steps",
        "reward=jnp.where(last, reward[:, None], 0.0)",
        "reward=jnp.where(rows.message_end, reward[:, None], 0.0)",
        (STEPS,),
    ),
    Wrong(
        "the end of a message is read twice",
        "run.host.dialogues.tool_env",
        "return ids[1:] if ids[0] in ends and message[-1] in ends else ids",
        "return ids",
        (ENVIRONMENTS + "test_a_dialogue_is_answered_and_rewarded",),
    ),
    Wrong(
        "a tool may catch its time limit",
        "run.host.dialogues.instances",
        "class OutOfTime(BaseException):",
        "class OutOfTime(Exception):",
        (TOOLS + "test_a_method_is_interrupted_whatever_it_catches",),
    ),
    Wrong(
        "members of a group are asked different questions",
        "run.host.dialogues.instances",
        'seed(job["seeds"][0])',
        'seed(job["seeds"][1])',
        (TOOLS + "test_a_reset_draws_what_its_first_seed_says",),
    ),
    Wrong(
        "a method of the contract is a tool",
        "language.pretrained.tools",
        "if name not in self.names:",
        "if False:",
        (TOOLS + "test_tags_are_found_and_calls_are_read_and_not_evaluated",),
    ),
    Wrong(
        "what the model wrote counts as data that may be run",
        "run.data.scoring_worker",
        'WRITTEN = ("completions", "messages")',
        'WRITTEN = ("completions",)',
        (TOOLS + "test_what_a_model_wrote_is_no_data",),
    ),
    Wrong(
        "an error of a reward names a line of the audit hook",
        "run.data.workers",
        "(__file__, guard.__file__, every[0].filename)",
        "(__file__, every[0].filename)",
        ("test_workers.py::test_an_error_names_the_line_of_the_users_file",),
    ),
    Wrong(
        "what a process starts outlives it",
        "run.data.workers",
        "os.setsid()",
        "pass",
        (WORKERS + "test_a_process_ends_with_what_it_started",),
    ),
    Wrong(
        "a late answer is taken for the next",
        "run.data.workers",
        "        _kill(self.pid)  # a late answer would count as an answer to the next message\n"
        "        self.close()\n",
        "",
        (WORKERS + "test_a_late_answer_is_not_that_to_the_next_message",),
    ),
    Wrong(
        "a call that hangs outlives a run that was killed",
        "run.data.scoring_worker",
        'faulthandler.dump_traceback_later(start["timeout"] + GRACE, exit=True, file=nowhere)',
        "pass",
        (WORKERS + "test_a_call_that_hangs_ends_though_nobody_can_kill_it",),
    ),
    Wrong(
        "with 64 bits, an answer of a dialogue is wider than what it replaces",
        "language.conversation",
        "like(answered, turn)",
        "answered",
        ("test_dialogues.py::test_programs_fit_together_with_64_bits",),
    ),
    Wrong(
        "a package may run what a completion calls",
        "run.data.guard",
        "self._deeds.isdisjoint(deeds(text))",
        "True",
        (SCORING + "test_packages_may_run_text_of_their_own_but_not_what_a_completion_calls",),
    ),
    Wrong(
        "what no reward function judges is trained on",
        "language.problem",
        "if absent.any():\n        given",
        "if False:\n        given",
        (SCORING + "test_what_no_function_judges_takes_no_part",),
    ),
]
