"""Planted mistakes in timings and of the check whether a machine was quiet."""

from wrong import Wrong

WRONG = [
    Wrong(
        "waiting for a disk is work",
        "experiments.benchmarks.bench.machine",
        "sum(each) - each[3] - each[4]",
        "sum(each) - each[3]",
        ("test_bench.py::test_the_clock_counts_the_processors_that_may_be_used",),
    ),
    Wrong(
        "our own work is that of others",
        "experiments.benchmarks.bench.machine",
        "(busy - own) / available",
        "busy / available",
        ("test_bench.py::test_the_clock_counts_the_processors_that_may_be_used",),
    ),
    Wrong(
        "one quiet turn makes a quiet machine",
        "experiments.benchmarks.bench.machine",
        "if told and sum(told) / len(told) > OTHERS:",
        "if told and min(told) > OTHERS:",
        ("test_bench.py::test_a_quiet_machine_has_no_noise",),
    ),
    Wrong(
        "compile times are those of programs that were kept",
        "experiments.benchmarks.timing",
        "for name, value in os.environ.items() if name != CACHE",
        "for name, value in os.environ.items()",
        ("test_bench.py::test_an_error_of_a_program_is_its_last_line",),
    ),
    Wrong(
        "the first turn counts",
        "experiments.benchmarks.timing",
        "name: values[1:]",
        "name: values[:-1]",
        ("test_benchmark_control.py::test_turns_run_there_and_back_and_the_first_does_not_count",),
    ),
]
