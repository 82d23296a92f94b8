"""Planted mistakes in held-out sets: rows of an evaluation, and the selection of a checkpoint."""

from wrong import Wrong

ONCE = "test_evaluation.py::test_every_row_of_a_finite_set_is_asked_once"
HOST = "test_environment_runs.py::test_each_row_of_a_set_is_asked_once"
SELECTS = "test_task_data.py::test_rows_of_the_test_set_select_no_checkpoint"

WRONG = [
    Wrong(
        "a warm start counts its steps in a loop that XLA drops",
        "language.warm_start",
        """        return rounds + 1, advance(model, task, settings, fit, rounds * BETWEEN)

    _, fit = jax.lax.while_loop(
        lambda loop: unfinished(settings, loop[0] * BETWEEN, loop[1].accuracy),""",
        """        return rounds + BETWEEN, advance(model, task, settings, fit, rounds)

    _, fit = jax.lax.while_loop(
        lambda loop: unfinished(settings, loop[0], loop[1].accuracy),""",
        ("test_warm_start.py::test_a_single_compiled_step_is_taken",),
    ),
    Wrong(
        "rows of a finite set are drawn with replacement",
        "language.tasks.types",
        "rows = jnp.array(task.test[: len(keys)], jnp.int32)",
        "rows = jax.vmap(lambda key: jax.random.choice(key, jnp.array(task.test)))(keys)",
        (ONCE, HOST),
    ),
    Wrong(
        "the last rows of a finite set are left out",
        "language.tasks.types",
        "return len(task.test) if finite",
        "return len(task.test) // 8 * 8 or len(task.test) if finite",
        (ONCE,),
    ),
    Wrong(
        "an evaluation counts the rows that fill its last part",
        "language.evaluation",
        "*x.shape[2:])[:total], made)",
        "*x.shape[2:]), made)",
        (ONCE,),
    ),
    Wrong(
        "every part of an evaluation asks the rows of the first",
        "language.evaluation",
        "index.reshape(parts, -1)",
        "index.reshape(parts, -1)[:1].repeat(parts, 0)",
        (ONCE,),
    ),
    Wrong(
        "rows of the test set select a checkpoint",
        "run.experiment.language",
        "return task if isinstance(task, Dialogue) else selecting(task)",
        "return task",
        (SELECTS,),
    ),
    Wrong(
        "a later evaluation asks the rows that selected the checkpoint",
        "run.experiment.language",
        "test=measure(task),",
        "test=measure(seen(task)),",
        (SELECTS,),
    ),
    Wrong(
        "demonstrations of the held-out split are trained on",
        "language.cross_entropy",
        "demonstrate(task, jax.vmap(lambda key: task.sample(key, False))(keys))",
        "demonstrate(task, jax.vmap(lambda key: task.sample(key, True))(keys))",
        ("test_sft.py::test_training_and_evaluation_ask_for_their_own_split",),
    ),
    Wrong(
        "the held-out loss is that of training problems",
        "language.demonstrations",
        "demonstrate(source, held_out(source, jax.random.split(key, asked)))",
        "draw_demonstrations(source, jax.random.split(key, asked))",
        ("test_sft.py::test_training_and_evaluation_ask_for_their_own_split",),
    ),
    Wrong(
        "validation rows are trained on",
        "language.tasks.table",
        "else (0, len(train))",
        "else (0, tested.start)",
        ("test_prompts.py::test_the_task_draws_each_split_and_knows_its_answers",),
    ),
    Wrong(
        "dialogues on the host select a checkpoint by test rows",
        "run.host.dialogues.engine",
        "task, key = selecting(self._host.task), ",
        "task, key = self._host.task, ",
        (HOST,),
    ),
    Wrong(
        "dialogues are evaluated on the training split",
        "language.dialogues.evaluation",
        "dialogue.reset(key, True)",
        "dialogue.reset(key, False)",
        ("test_dialogues.py::test_dialogues_are_held_out_in_an_evaluation",),
    ),
]
