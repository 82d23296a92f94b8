"""Planted mistakes in ahead-of-time compilation and of counts in HLO."""

from wrong import Wrong

LOOP = "test_hlo.py::test_a_loop_of_a_tpu_counts_as_often_as_it_turns"
KERNELS = "test_hlo.py::test_kernels_that_are_not_hlo_are_named_and_what_follows_them_is_counted"
GATHER = "test_hlo.py::test_a_gather_beside_a_product_counts_once_and_a_scattered_sum_as_such"
FITS = "test_aot.py::test_a_program_fits_if_its_total_is_within_the_memory"
WRONG = [
    Wrong(
        "outputs that replace an argument count twice",
        "run.devices.memory",
        "sizes.output_size_in_bytes - sizes.alias_size_in_bytes",
        "sizes.output_size_in_bytes",
        (FITS,),
    ),
    Wrong(
        "a program fits without its code",
        "run.aot",
        'memory.get("total", 0) <= machine.memory',
        'memory.get("total", 0) - memory["code"] <= machine.memory',
        (FITS,),
    ),
    Wrong(
        "an attached TPU is hidden",
        "run.devices.topology",
        "(asked, *map(glob.glob, DEVICES))",
        "()",
        ("test_aot.py::test_libtpu_is_silenced_where_no_tpu_is",),
    ),
    Wrong(
        "libtpu looks for its host and prints the failure",
        "__main__",
        '"jaxrl_po.run.devices.topology").silence_libtpu()',
        '"jaxrl_po.run.devices.topology")',
        ("test_aot.py::test_every_command_silences_libtpu",),
    ),
    Wrong(
        "microbatches are chosen for sampling",
        "run.aot",
        "*sampling, memory = [",
        "memory, *sampling = [",
        ("test_aot.py::test_programs_are_reported_with_the_fewest_microbatches",),
    ),
    Wrong(
        "microbatches are chosen though sampling does not fit",
        "run.aot",
        "memory.beside(*sampling) if sampling else memory",
        "memory",
        ("test_aot.py::test_programs_are_reported_with_the_fewest_microbatches",),
    ),
    Wrong(
        "programs that do not fit are not reported",
        "run.aot",
        "    finally:\n        yield from found",
        "    except ZeroDivisionError:\n        raise\n    yield from found",
        ("test_aot.py::test_programs_are_reported_with_the_fewest_microbatches",),
    ),
    Wrong(
        "demonstrations are compiled for the machine that is here",
        "run.experiment.language",
        "num_prompts=settings.num_prompts, **shared",
        "num_prompts=settings.num_prompts, initial=initial",
        ("test_aot.py::test_programs_that_sample_nothing_are_of_the_machine_too[None]",),
    ),
    Wrong(
        "a gather counts in each fusion that carries it on",
        "experiments.benchmarks.hlo_counts",
        'self._begun |= {channel} - {""}',
        "self._begun |= set()",
        (GATHER,),
    ),
    Wrong(
        "of temporaries that do not fit the size is not read",
        "run.devices.memory",
        "(Used|temporaries)",
        "(Used)",
        ("test_aot.py::test_a_refused_program_has_the_compilers_reason",),
    ),
    Wrong(
        "a group over one axis of a mesh is the whole mesh",
        "experiments.benchmarks.hlo_counts",
        "for axis in re.findall(r\"'(\\w+)'\", mesh[2])",
        "for axis in sizes",
        (GATHER,),
    ),
    Wrong(
        "a slice into the chip's memory is read from nowhere",
        "experiments.benchmarks.hlo_counts",
        'part.layout.replace("S(1)", "")',
        "part.layout",
        (GATHER,),
    ),
    Wrong(
        "the body of a loop counts once",
        "experiments.benchmarks.hlo_counts",
        'total.add(self._cost(dict(called)["body"], fused), trips or 1)',
        'total.add(self._cost(dict(called)["body"], fused), 1)',
        (LOOP,),
    ),
    Wrong(
        "a slice of a stack reads the whole stack",
        "experiments.benchmarks.hlo_counts",
        "inner = self._sliced(called, called.parameter(user.operands.index(name)))",
        "inner = None",
        (LOOP,),
    ),
    Wrong(
        "parts of the logits are computed on every device",
        "run.devices.sharding",
        "return (function if whole else local)(params, rows)",
        "return function(params, rows)",
        ("test_sharding.py::test_parts_of_the_logits_are_computed_where_their_rows_are",),
    ),
    Wrong(
        "what the sampler rounded is trained",
        "run.devices.sharding",
        "place(sampled._replace(params=state.params))",
        "place(sampled)",
        ("test_sharding.py::test_what_is_sampled_with_is_rounded_and_what_is_trained_is_not",),
    ),
    Wrong(
        "a ring sends a sum once",
        "experiments.benchmarks.hlo_counts",
        '"all-reduce": 2 * share * size',
        '"all-reduce": share * size',
        (LOOP,),
    ),
    Wrong(
        "a loop that may end early is said to turn to its bound",
        "experiments.benchmarks.hlo_loops",
        "return [bound for bounds, _ in both for bound in bounds], False",
        "return [bound for bounds, _ in both for bound in bounds], True",
        ("test_hlo.py::test_a_loop_that_may_end_early_counts_to_its_bound_and_says_so",),
    ),
    Wrong(
        "a kernel's metadata end the program",
        "experiments.benchmarks.hlo",
        r'elif re.match(r"\}(,|$)", line) and name:',
        'elif line.startswith("}") and name:',
        (KERNELS,),
    ),
    Wrong(
        "kernels that are not HLO are passed over",
        "experiments.benchmarks.hlo_counts",
        "self.uncounted.get(target, 0) + times * calls",
        "self.uncounted.get(target, 0)",
        (KERNELS,),
    ),
    Wrong(
        "the gaps of a dilation are multiplied",
        "experiments.benchmarks.hlo_products",
        "if (first + o * stride) % holes == 0:",
        "if (first + o * stride) % holes >= 0:",
        ("test_hlo.py::test_taps_of_a_window_are_those_that_meet_an_element",),
    ),
]
