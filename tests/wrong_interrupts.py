"""Planted mistakes in interrupts of calls in Python, and in handlers that a call must restore."""

from wrong import table

WRONG = table("""
an interrupted training returns, and a loop goes on
  run.experiment.training: test_interrupted_calls.py::test_one_interrupt_ends_a_loop_over_trainings
  - if interrupted and not leave_early:
  + if False:
a command that is interrupted and saved fails
  run.experiment.training: test_interrupted_calls.py::test_interrupted_command_exits_with_zero
  - if interrupted and not leave_early:
  + if interrupted:
a second interrupt ends the process that called run.train
  run.loop.signals: test_interrupted_calls.py::test_second_interrupt_in_a_hook_raises_at_once
  - for each in SIGNALS if leave_early else ():
  + for each in SIGNALS:
a second interrupt waits for the iteration
  run.loop.signals: test_interrupted_calls.py::test_second_interrupt_does_not_wait_for_the_iteration
  - (stop.is_set() and number != signal.SIGHUP)
  + False
a second hangup in Python ends the run unsaved
  run.loop.signals: test_interrupted_calls.py::test_second_hangup_changes_nothing
  - stop.is_set() and number != signal.SIGHUP
  + stop.is_set()
a second interrupt in a hook counts as the first
  run.loop.runner: test_interrupted_calls.py::test_second_interrupt_in_a_hook_raises_at_once
  - if self.stop.is_set():
  + if False:
an interrupt in the last row is lost
  run.loop.runner: test_interrupted_calls.py::test_interrupt_counts_in_first_and_last_row
  - interrupted = cut or processes.any_of(stop.is_set())
  + interrupted = cut
an interrupt while curves are drawn is lost
  run.experiment.training:
    test_interrupted_calls.py::test_interrupt_while_curves_are_drawn_loses_nothing
  - outcome.interrupted or processes.any_of(stop.is_set())
  + outcome.interrupted
a KeyboardInterrupt of a hook loses the result
  run.loop.runner: test_interrupted_calls.py::test_keyboard_interrupt_of_a_hook_is_an_interrupt
  - except KeyboardInterrupt:
  + except GeneratorExit:
a signal between two handlers leaves the first one set
  run.loop.signals: test_interrupted_calls.py::test_interrupt_between_handlers_restores_all
  -                 stack.callback(signal.signal, each, before)
  -                 signal.signal(each, handler)
  +                 signal.signal(each, handler)
  +                 stack.callback(signal.signal, each, before)
a handler that C set is put back as none
  run.loop.signals: test_interrupted_calls.py::test_handler_that_c_set_stays
  - if before is not None and (each, before) != IGNORED:
  + if (each, before) != IGNORED:
another thread sets handlers
  run.loop.signals: test_interrupted_calls.py::test_another_thread_sets_no_handler
  - if threading.current_thread() is threading.main_thread() else ()
an interrupted sweep goes on with the next program
  run.experiment.sweeping: test_interrupted_calls.py::test_interrupted_sweep_holds_programs_so_far
  - if interrupted:
  + if False:
an interrupted sweep loses its programs
  run.experiment.sweeping: test_interrupted_calls.py::test_interrupted_sweep_holds_programs_so_far
  - swept = SweepResult(rows,
  + swept = SweepResult([],
an interrupted program of a sweep loses its evaluations
  run.experiment.sweeping:
    test_interrupted_calls.py::test_interrupted_program_of_a_sweep_has_its_evaluations
  - if outcome.interrupted and not rows:
  + if outcome.interrupted:
""")
