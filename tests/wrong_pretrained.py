"""Wrong programs of pretrained models, adapters and large vocabularies."""

from wrong import Wrong

LOGITS = "test_pretrained.py::test_logits_are_those_of_transformers"
MERGED = "test_lora.py::test_adapters_equal_the_merged_matrices"

WRONG = [
    Wrong(
        "norms of queries and keys after they are rotated",
        "language.blocks",
        "k_BxKxSxC = rotate(k_BxNxKxC, *turns_Nxh)",
        "k_BxKxSxC = rotate(self._normed(k_BxNxKxC, 'query_norm'), *turns_Nxh)",
        (f"{LOGITS}[qwen3]",),
    ),
    Wrong(
        "Gemma's norms without the 1 of 1 + w",
        "language.pretrained.architectures",
        "offset=1.0 if model.post_norms else 0.0",
        "offset=0.0",
        (f"{LOGITS}[gemma3]",),
    ),
    Wrong(
        "the slow frequencies of Llama 3 are not stretched",
        "language.rope",
        "stretched_h = (1 - kept_h) * stretched_h + kept_h * frequency_h",
        "stretched_h = frequency_h",
        (f"{LOGITS}[llama]",),
    ),
    Wrong(
        "a window of one position more",
        "language.transformer",
        "(behind_NxS < window)",
        "(behind_NxS <= window)",
        (f"{LOGITS}[gemma3]",),
    ),
    Wrong(
        "the first of several ends alone",
        "language.sampling",
        "ends = jnp.atleast_1d(jnp.asarray(eos, jnp.int32))",
        "ends = jnp.atleast_1d(jnp.asarray(eos, jnp.int32))[:1]",
        ("test_pretrained.py::test_a_completion_ends_at_any_of_the_ends",),
    ),
    Wrong(
        "a template may reach objects of Python",
        "language.pretrained.text",
        "environment = ImmutableSandboxedEnvironment(",
        "environment = jinja2.Environment(",
        ("test_pretrained.py::test_templates_cannot_reach_out_and_their_errors_are_named",),
    ),
    Wrong(
        "adapters are scaled by α",
        "language.blocks",
        "self.lora.scale * change_MxO",
        "self.lora.alpha * change_MxO",
        (f"{MERGED}[qwen2]",),
    ),
    Wrong(
        "the completions are sampled without the adapters' base",
        "language.problem",
        "{lora.ADAPTERS: policy[lora.ADAPTERS]}, initial",
        "{lora.ADAPTERS: policy[lora.ADAPTERS]}, jax.tree.map(jnp.zeros_like, initial)",
        ("test_lora.py::test_the_first_policy_is_the_base",),
    ),
    Wrong(
        "the KL of a large vocabulary is to itself",
        "language.unembedding",
        "matrices=(self.matrix, other.matrix)",
        "matrices=(self.matrix, self.matrix)",
        ("test_unembedding.py::test_values_and_gradients_are_those_of_the_plain_one[kl-44]",),
    ),
    Wrong(
        "the logits of all rows are kept for the backward pass",
        "language.unembedding",
        "recomputed = jax.checkpoint(function)",
        "recomputed = function",
        ("test_unembedding.py::test_the_logits_of_all_rows_are_never_held",),
    ),
    Wrong(
        "PAD is the EOS of demonstrations",
        "language.pretrained.text",
        "if token not in (None, ends[0])",
        "if token is not None",
        ("test_pretrained.py::test_pad_is_never_the_eos_of_a_demonstration[settings0-ends0-0]",),
    ),
    Wrong(
        "a prompt is shown up to its first end",
        "language.evaluation",
        "task.tokenizer.decode_rows(tokens, tokens != task.tokenizer.pad)",
        "[decode(row.tolist()) for row in tokens]",
        ("test_pretrained.py::test_a_chat_is_shown_whole",),
    ),
    Wrong(
        "every scanned block has the window of the first",
        "language.transformer",
        "xs = blocks, jnp.asarray(self.windows or (0,) * self.layers), numbers",
        "xs = blocks, jnp.asarray((self.windows or (0,))[:1] * self.layers), numbers",
        ("test_blocks.py::test_scanned_blocks_are_those_of_a_loop[gemma3-False]",),
    ),
    Wrong(
        "scanned blocks read the cache of the first",
        "language.blocks",
        "jax.lax.dynamic_index_in_dim(held, number, axis=1, keepdims=False)",
        "jax.lax.dynamic_index_in_dim(held, 0 * number, axis=1, keepdims=False)",
        ("test_blocks.py::test_scanned_and_unrolled_are_one_function[None]",),
    ),
    Wrong(
        "a step of bfloat16 parameters is rounded before it is taken",
        "updates",
        "(p + scale * u).astype(p.dtype)",
        "p + (scale * u).astype(p.dtype)",
        ("test_blocks.py::test_bfloat16_parameters_have_float32_moments_and_are_rounded_once",),
    ),
    Wrong(
        "moments in the type of the parameters",
        "optimizers",
        "return optimizer.init(widened(params))",
        "return optimizer.init(params)",
        ("test_blocks.py::test_bfloat16_parameters_have_float32_moments_and_are_rounded_once",),
    ),
    Wrong(
        "flat moments of an earlier version stay in its order",
        "run.layouts",
        "state[name] = _reordered(array, params)",
        "state[name] = array",
        ("test_layouts.py::test_a_state_with_blocks_apart_is_read",),
    ),
    Wrong(
        "blocks of an earlier version are stacked in the order of their names",
        "run.layouts",
        "for number in sorted(layers)",
        "for number in sorted(layers, key=str)",
        ("test_layouts.py::test_a_state_with_blocks_apart_is_read",),
    ),
]
