"""Wrong programs: interrupts of calls in Python, and the handlers of before."""

from wrong import Wrong

CALLS = "test_interrupted_calls.py::"
WRONG = [
    Wrong(
        "an interrupted training returns, and a loop goes on",
        "run.experiment.training",
        "if interrupted and not leave_early:",
        "if False:",
        (CALLS + "test_one_interrupt_ends_a_loop_over_trainings",),
    ),
    Wrong(
        "a command that is interrupted and saved fails",
        "run.experiment.training",
        "if interrupted and not leave_early:",
        "if interrupted:",
        (CALLS + "test_interrupted_command_exits_with_zero",),
    ),
    Wrong(
        "a second interrupt ends the process that called run.train",
        "run.loop.signals",
        "for each in SIGNALS if leave_early else ():",
        "for each in SIGNALS:",
        (CALLS + "test_second_interrupt_in_a_hook_raises_at_once",),
    ),
    Wrong(
        "a second interrupt waits for the iteration",
        "run.loop.signals",
        "(stop.is_set() and number != signal.SIGHUP)",
        "False",
        (CALLS + "test_second_interrupt_does_not_wait_for_the_iteration",),
    ),
    Wrong(
        "a second hangup in Python ends the run unsaved",
        "run.loop.signals",
        "stop.is_set() and number != signal.SIGHUP",
        "stop.is_set()",
        (CALLS + "test_second_hangup_changes_nothing",),
    ),
    Wrong(
        "a second interrupt in a hook counts as the first",
        "run.loop.runner",
        "if self.stop.is_set():",
        "if False:",
        (CALLS + "test_second_interrupt_in_a_hook_raises_at_once",),
    ),
    Wrong(
        "an interrupt in the last row is lost",
        "run.loop.runner",
        "interrupted = cut or processes.any_of(stop.is_set())",
        "interrupted = cut",
        (CALLS + "test_an_interrupt_counts_in_the_first_and_last_row",),
    ),
    Wrong(
        "an interrupt while curves are drawn is lost",
        "run.experiment.training",
        "outcome.interrupted or processes.any_of(stop.is_set())",
        "outcome.interrupted",
        (CALLS + "test_interrupt_while_curves_are_drawn_loses_nothing",),
    ),
    Wrong(
        "a KeyboardInterrupt of a hook loses the result",
        "run.loop.runner",
        "except KeyboardInterrupt:",
        "except GeneratorExit:",
        (CALLS + "test_keyboard_interrupt_of_a_hook_is_an_interrupt",),
    ),
    Wrong(
        "a signal between two handlers leaves the first one set",
        "run.loop.signals",
        """                stack.callback(signal.signal, each, before)
                signal.signal(each, handler)""",
        """                signal.signal(each, handler)
                stack.callback(signal.signal, each, before)""",
        (CALLS + "test_interrupt_between_handlers_restores_all",),
    ),
    Wrong(
        "a handler that C set is put back as none",
        "run.loop.signals",
        "if before is not None and (each, before) != IGNORED:",
        "if (each, before) != IGNORED:",
        (CALLS + "test_handler_that_c_set_stays",),
    ),
    Wrong(
        "another thread sets handlers",
        "run.loop.signals",
        "if threading.current_thread() is threading.main_thread() else ()",
        "",
        (CALLS + "test_another_thread_sets_no_handler",),
    ),
    Wrong(
        "an interrupted sweep goes on with the next program",
        "run.experiment.sweeping",
        "if interrupted:",
        "if False:",
        (CALLS + "test_interrupted_sweep_holds_programs_so_far",),
    ),
    Wrong(
        "an interrupted sweep loses its programs",
        "run.experiment.sweeping",
        "raise Interrupted(swept=Swept(rows,",
        "raise Interrupted(swept=Swept([],",
        (CALLS + "test_interrupted_sweep_holds_programs_so_far",),
    ),
    Wrong(
        "an interrupted program of a sweep loses its evaluations",
        "run.experiment.sweeping",
        "if outcome.interrupted and not rows:",
        "if outcome.interrupted:",
        (CALLS + "test_interrupted_program_of_a_sweep_has_its_evaluations",),
    ),
]
