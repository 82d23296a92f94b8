"""Wrong programs of what is had from Python: hooks, objects of one's own, policies."""

from wrong import Wrong

WRONG = [
    Wrong(
        "a hook holds the line itself and may change it",
        "run.loop.hooks",
        "on_row(copy.deepcopy(row))",
        "on_row(row)",
        ("test_hooks.py::test_a_hook_gets_each_line_and_may_add_numbers",),
    ),
    Wrong(
        "a run that a hook ends lacks its last evaluation",
        "run.loop.runner",
        "row |= {} if evaluated else self.evaluation(place)",
        "row |= {}",
        ("test_hooks.py::test_a_hook_ends_a_run_saved_and_evaluated_and_it_goes_on",),
    ),
]
