"""Planted mistakes in pretrained models, adapters and large vocabularies."""

from wrong import Wrong, table

LOGITS = "test_pretrained.py::test_logits_are_those_of_transformers"

TEXT = """
rows of q and k of a GGUF file stay interleaved
  language.pretrained.gguf:
    test_gguf.py::test_a_file_is_the_folder_of_the_same_tensors_and_tokens[llama]
  - return _halves(array, heads) if heads else array
  + return array
rows of q and k are turned where the converter left them
  language.pretrained.gguf:
    test_gguf.py::test_a_file_is_the_folder_of_the_same_tensors_and_tokens[qwen3]
  - heads if config["model_type"] == LLAMA else {}
  + heads
keys of a GGUF file are turned as if there were one for each query
  language.pretrained.gguf:
    test_gguf.py::test_a_file_is_the_folder_of_the_same_tensors_and_tokens[llama]
  - "k_proj": config.get("num_key_value_heads", config["num_attention_heads"])
  + "k_proj": config["num_attention_heads"]
the stretched frequencies of a GGUF file are passed over
  language.pretrained.gguf:
    test_gguf.py::test_a_file_is_the_folder_of_the_same_tensors_and_tokens[llama]
  - config["rope_scaling"] = _stretched(
  + _stretched(
numbers of a GGUF file keep the digits that float32 gave them
  language.pretrained.gguf:
    test_gguf.py::test_a_file_is_the_folder_of_the_same_tensors_and_tokens[qwen3]
  - float(str(np.float32(value))) if isinstance(value, float) else value
  + value
an entry of a GGUF file that no formula has is passed over
  language.pretrained.gguf: test_gguf.py::test_what_is_not_read_is_named[experts]
  - if value and name not in (*SETTINGS, *OTHERS, *SCALING):
  + if False:
words of the vocabulary are merged from pairs in Llama 3 too
  language.pretrained.gguf: test_gguf.py::test_a_word_of_the_vocabulary_needs_no_merges_in_llama_3
  - "ignore_merges": pre == "llama-bpe"
  + "ignore_merges": False
what a GGUF file adds to a text is left out
  language.pretrained.text: test_gguf.py::test_a_token_is_added_where_the_file_says
  - files.adds_tokens or FLAGGED.match(str(kind))
  + FLAGGED.match(str(kind))
digits are split in threes in every GGUF file
  language.pretrained.gguf: test_gguf.py::test_texts_are_split_as_the_pre_tokenizer_says[qwen2]
  - "qwen2": _split("")
  + "qwen2": _split("{1,3}")
a flag of the tokenizer wins over what tokenizer.json adds
  language.pretrained.text:
    test_special_tokens.py::test_flags_that_contradict_the_tokenizer_are_refused
  - if whole != bare or "TemplateProcessing" in str(rules.post_processor):
  + if False:
flags of the tokenizer are read without their defaults
  language.pretrained.text: test_special_tokens.py::test_flags_add_tokens_as_in_transformers
  - added("bos_token", True), added("eos_token", False)
  + added("bos_token", False), added("eos_token", False)
BOS stands twice before a prompt that begins with it
  language.pretrained.text:
    test_special_tokens.py::test_a_prompt_that_begins_with_bos_gets_no_second
  - found.ids[1:] if _is_doubled(found) else found.ids
  + found.ids
an answer is begun behind a message of the assistant's own
  run.data.prompts: test_special_tokens.py::test_a_last_message_of_the_assistant_is_continued
  - messages[-1]["role"] == ASSISTANT
  + False
a message that a template trims keeps what stands before its end
  language.pretrained.templates:
    test_special_tokens.py::test_a_last_message_of_the_assistant_is_continued
  - shown if rest.startswith(" ") else shown.rstrip()
  + shown
an end beyond the vocabulary never comes
  language.pretrained.text: test_special_tokens.py::test_ends_that_are_no_ids_are_refused
  - type(end) is int and 0 <= end < vocabulary
  + type(end) is int and 0 <= end
the newer spelling of RoPE is read and the older one ignored
  language.pretrained.architectures:
    test_rope_spellings.py::test_spellings_that_contradict_each_other_are_refused
  - given = [spelling for spelling in spellings if spelling]
  + given = [spelling for spelling in spellings if spelling][:1]
a template without tools takes the branch of tools
  language.pretrained.templates: test_templates.py::test_what_a_template_is_given
  - {"tools": None, "documents": None, **self.special
  + {**self.special
a special token that is not there is an empty text
  language.pretrained.templates:
    test_templates.py::test_a_special_token_that_is_not_there_is_an_error
  - undefined=Missing,
special tokens of the older file are lost
  language.pretrained.text: test_templates.py::test_special_tokens_come_from_either_file
  - named = files.json(SPECIAL_MAP) | settings
  + named = settings
kernels held for decoding keep the type of the parameters
  language.kernels: test_kernels.py::test_a_step_computes_the_same[bfloat16]
  - matrix["kernel"].astype(dtype)
  + matrix["kernel"].astype("float32")
adapters decode as if there were no base beside them
  language.lora: test_kernels.py::test_a_step_computes_the_same[adapters]
  - return {name: x for name, x in held.items() if name not in self.base}
  + return adapters
many actions are drawn without their logits
  distributions: test_kernels.py::test_many_actions_are_drawn_by_every_bit
  - return _argmax(logits + gumbel(
  + return _argmax(0.0 * logits + gumbel(
many actions are drawn from 23 bits each
  distributions: test_kernels.py::test_many_actions_are_drawn_by_every_bit
  - gumbel = _gumbel if logits.shape[-1] > MANY else jax.random.gumbel
  + gumbel = jax.random.gumbel
a reward function is shown the end of a completion
  language.pretrained.text: test_pretrained.py::test_a_completion_ends_at_any_of_the_ends
  - kept = mask & ~np.isin(tokens, self.ends)
  + kept = mask
of many equal actions the last is the mode
  distributions: test_kernels.py::test_the_first_of_equal_actions_is_the_mode
  - return jnp.min(jnp.where(x < jnp.max(x, axis=-1, keepdims=True), size, index), axis=-1)
  + return jnp.max(jnp.where(x < jnp.max(x, axis=-1, keepdims=True), 0, index), axis=-1)
Gemma's norms without the 1 of 1 + w
  language.pretrained.architectures:
    test_pretrained.py::test_logits_are_those_of_transformers[gemma3]
  - offset=1.0 if model.post_norms else 0.0
  + offset=0.0
the slow frequencies of Llama 3 are not stretched
  language.rope: test_pretrained.py::test_logits_are_those_of_transformers[llama]
  - stretched_h = (1 - kept_h) * stretched_h + kept_h * frequency_h
  + stretched_h = frequency_h
a window of one position more
  language.transformer: test_pretrained.py::test_logits_are_those_of_transformers[gemma3]
  - (behind_NxS < window)
  + (behind_NxS <= window)
the first of several ends alone
  language.stopping: test_pretrained.py::test_a_completion_ends_at_any_of_the_ends
  - jnp.isin(token, jnp.asarray(self.tokens, jnp.int32))
  + token == self.tokens[0]
a template may reach objects of Python
  language.pretrained.templates:
    test_pretrained.py::test_templates_cannot_reach_out_and_their_errors_are_named
  - environment = ImmutableSandboxedEnvironment(
  + environment = jinja2.Environment(
adapters are scaled by α
  language.blocks: test_lora.py::test_adapters_equal_the_merged_matrices[qwen2]
  - self.lora.scale * change_MxO
  + self.lora.alpha * change_MxO
the completions are sampled without the adapters' base
  language.networks: test_lora.py::test_the_first_policy_is_the_base
  - {lora.ADAPTERS: policy[lora.ADAPTERS]}, initial
  + {lora.ADAPTERS: policy[lora.ADAPTERS]}, jax.tree.map(jnp.zeros_like, initial)
the KL of a large vocabulary is to itself
  language.unembedding:
    test_unembedding.py::test_values_and_gradients_are_those_of_the_plain_one[kl-44]
  - [one.matrix for one in each]
  + [self.matrix for one in each]
the logits of all rows are kept for the backward pass
  language.unembedding: test_unembedding.py::test_the_logits_of_all_rows_are_never_held
  - of_some if held else jax.checkpoint(of_some)
  + of_some
logits that are held at once are computed again
  language.unembedding: test_unembedding.py::test_what_is_held_at_once_is_computed_once
  - of_some if held else jax.checkpoint(of_some)
  + jax.checkpoint(of_some)
PAD is the EOS of demonstrations
  language.pretrained.text:
    test_pretrained.py::test_pad_is_never_the_eos_of_a_demonstration[settings0-ends0-0]
  - if i not in (None, ends[0]) and
  + if i is not None and
a prompt is shown up to its first end
  language.evaluation: test_pretrained.py::test_a_chat_is_shown_whole
  - task.tokenizer.decode_rows(tokens, np.arange(tokens.shape[1]) >= pad[:, None])
  + [decode(row.tolist()) for row in tokens]
every scanned block has the window of the first
  language.transformer: test_blocks.py::test_scanned_blocks_are_those_of_a_loop[gemma3-False]
  - xs = blocks, jnp.asarray(self.windows or (0,) * self.layers), numbers
  + xs = blocks, jnp.asarray((self.windows or (0,))[:1] * self.layers), numbers
scanned blocks read the cache of the first
  language.blocks: test_blocks.py::test_scanned_and_unrolled_are_one_function[None]
  - jax.lax.dynamic_index_in_dim(held, number, axis=1, keepdims=False)
  + jax.lax.dynamic_index_in_dim(held, 0 * number, axis=1, keepdims=False)
a step of bfloat16 parameters is rounded before it is taken
  updates: test_blocks.py::test_bfloat16_parameters_have_float32_moments_and_are_rounded_once
  - (p + scale * u).astype(p.dtype)
  + p + (scale * u).astype(p.dtype)
moments in the type of the parameters
  optimizers: test_blocks.py::test_bfloat16_parameters_have_float32_moments_and_are_rounded_once
  - return optimizer.init(widened(params))
  + return optimizer.init(params)
a text without the tokens that the tokenizer adds
  run.data.prompts:
    test_pretrained_input.py::test_a_text_gets_the_tokens_that_the_tokenizer_adds_and_a_chat_gets_none
  - self.tokenizer.encode(row.prompt, special=True)
  + self.tokenizer.encode(row.prompt)
adapters go on over another base
  run.store.provenance:
    test_pretrained_runs.py::test_other_base_is_refused_and_missing_named
  - if digest and before != digest:
  + if digest and not before:
a run begins with the base of the adapters alone
  run.experiment.models: test_pretrained_runs.py::test_a_run_begins_where_adapters_ended
  - _merged(over.policy, over.params, found[1])
  + over.params
loaded parameters are constants of the program
  run.experiment.language: test_pretrained_runs.py::test_base_is_an_argument_of_the_programs
  - compose(pair[1]).init(pair[0])
  + compose(given).init(pair[0])
an answer is right in its own tokens alone
  language.tasks.table: test_texts.py::test_digits_that_merge_are_right_one_by_one
  - jnp.maximum(exact, match(rows.texts, row, tokens, tokenizer.ends).score)
  + exact
space before an answer counts
  language.tasks.texts: test_texts.py::test_a_text_is_right_in_whatever_tokens
  - (stop - lengths)[first] + before[tokens[first]]
  + (stop - lengths)[first]
a text that goes on is an answer
  language.tasks.texts: test_texts.py::test_a_text_is_right_in_whatever_tokens
  - & (end - begin == size[row])
  + & (end - begin >= size[row])
special tokens of the map are not exported
  language.pretrained.text:
    test_pretrained.py::test_special_tokens_generation_and_named_templates_are_written
  - if others.get(SPECIAL_MAP):
  + if False:
an export keeps the ends of generation alone
  language.pretrained.text:
    test_pretrained.py::test_special_tokens_generation_and_named_templates_are_written
  - dict(others.get(GENERATION, {})) | ends
  + ends
an old index comes before the one file
  language.pretrained.files: test_pretrained.py::test_one_file_comes_before_an_index
  - if (folder / WEIGHTS).exists():
  + if (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
another output of a tied model is dropped
  language.pretrained.weights: test_pretrained.py::test_a_bad_folder_is_named
  - second and not np.array_equal(found[EMBEDDING].read(), found[HEAD].read())
  + second and found[EMBEDDING].shape != found[HEAD].shape
integers are read as weights
  language.pretrained.files: test_pretrained.py::test_a_bad_folder_is_named
  - DTYPES = ("F64",
  + DTYPES = ("I8", "F64",
an export has RoPE in the spelling of transformers 5 alone
  language.pretrained.architectures: test_rope_spellings.py::test_an_export_has_both_spellings
  -         **former_rope_settings(model.rope),
  -
the first boxed answer counts
  run.data.mathematics: test_mathematics.py::test_the_last_answer_counts
  - boxes[-1].end()
  + boxes[0].end()
the verifier scores the evaluation of a pretrained model
  run.experiment.rewarding:
    test_pretrained_input.py::test_messages_are_written_by_the_template_and_a_function_rewards_them
  - pretrained or finds_answers(options) or unanswered(options, task)
  + False
a run compiles the prompts of its file into its program
  run.experiment.language: test_task_data.py::test_no_program_of_a_run_holds_the_file
  - source = reading(task, given)
  + source = task
a problem samples from the lists and not from the state
  language.problem: test_task_data.py::test_the_text_does_not_grow_with_the_file
  - source = _drawn_from(reading(task, params.frozen), settings.prompt_set)
  + source = _drawn_from(task, settings.prompt_set)
a stop string that fails to go on begins anew
  language.stopping: test_stopping.py::test_rows_end_where_the_text_first_holds_a_string
  - return next(numbers[text[i:]] for i in range(len(text) + 1) if text[i:] in numbers)
  + return numbers.get(text, 0)
a stop string spans two messages
  language.conversation: test_stopping.py::test_messages_of_a_dialogue_end_with_the_string
  - turns=turn.turns + 1
  + turns=turn.turns + 1, matched=turn.matched
prompts are padded as the first rows are
  language.blocks: test_shared_prompts.py::test_values_and_gradients_are_those_of_whole_rows[plain]
  - mask_BxRxS[:: batch // groups, :shared, :shared]
  + mask_BxRxS[:groups, :shared, :shared]
members that are left out leave whole groups
  algorithms.group_policy:
    test_shared_prompts.py::test_omitted_members_make_groups_partial
  - config.num_minibatches == 1 and not extra_samples
  + config.num_minibatches == 1
log-probabilities and entropies in the order of the other
  language.unembedding: test_unembedding.py::test_values_and_gradients_are_those_of_the_plain_one
  - return chosen - log_total, entropy
  + return entropy, chosen - log_total
rows are cut to the number of their slots in the mask
  lengths: test_lengths.py::test_a_gap_counts
  - (samples.mask * jnp.arange(1, samples.mask.shape[1] + 1)[None, :]).max(axis=1)
  + samples.mask.sum(axis=1)
the groups of a KL are counted from the first of each device
  algorithms.group_policy: test_group_policy.py::test_every_fourth_group_is_counted_over_devices[2]
  - natural_updates.every(stride, groups, axis_name)
  + natural_updates.every(stride, groups, None)
a KL counts the groups beside every n-th
  algorithms.group_policy: test_group_policy.py::test_every_fourth_group_is_counted_over_devices[2]
  - chosen._replace(mask=mask)
  + chosen
a KL in parts that do not divide its rows is of fewer parts
  algorithms.actor_critic: test_lengths.py::test_parts_of_kl_are_within_their_size
  - n for n in range(num_parts, rows + 1) if rows % n == 0
  + n for n in range(num_parts, 0, -1) if rows % n == 0
side by side, rows are cut to the longest of the first
  lengths: test_lengths.py::test_vmapped_rows_are_cut_to_the_longest
  - return _of_all(longest.max()), False
  + return _of_all(longest[0]), False
the rows of shuffled minibatches are not sorted
  lengths: test_lengths.py::test_shuffled_rows_are_sorted_within_their_minibatch
  - rows = samples if in_order else sort(samples)
  + rows = samples
a critic reads shuffled rows as groups
  algorithms.npg: test_shared_prompts.py::test_methods_with_a_critic_read_prompts_once_too[trpo]
  - plain=plain,  # the critic's minibatches are shuffled
old log-probabilities are of another pass than the ratio's
  algorithms.npg:
    test_shared_prompts.py::test_old_log_probs_match_pass_of_update[trpo]
  -         problem,
  -         estimate=
  +         plain,
  +         estimate=
some rows of a Fisher product are read as groups
  natural_updates: test_shared_prompts.py::test_methods_with_a_critic_read_prompts_once_too[trpo]
  - of_some if of_some and fisher_stride > 1 else policy
  + policy
shuffled rows are read as groups
  algorithms.ppo:
    test_shared_prompts.py::test_shuffled_rows_with_critic_are_read_whole
  - config.num_minibatches == 1)
  + True)
only the first end of a folder ends a right answer
  language.tasks.verify:
    test_pretrained.py::test_an_answer_may_end_with_any_end_and_is_taught_that_of_the_template
  - if len(tokenizer.ends) == 1:
  + if tokenizer.ends:
a loaded policy reads a text without BOS
  run.experiment.policies:
    test_pretrained_input.py::test_a_text_gets_the_tokens_that_the_tokenizer_adds_and_a_chat_gets_none
  - return tokenizer.encode(prompt, special=True)
  + return tokenizer.encode(prompt)
a second BOS is written
  language.pretrained.text:
    test_special_tokens.py::test_a_prompt_that_begins_with_bos_gets_no_second
  - found.ids[1:] if _is_doubled(found) else found.ids
  + found.ids
every tokenizer follows add_bos_token
  language.pretrained.text: test_special_tokens.py::test_flags_add_tokens_as_in_transformers
  - files.adds_tokens or FLAGGED.match(str(kind))
  + True
a message that is continued is closed first
  language.pretrained.templates:
    test_special_tokens.py::test_a_last_message_of_the_assistant_is_continued
  - shown, tag, rest = text.rpartition(CUT.strip())
  + shown, tag, rest = text.replace(CUT, ''), CUT, ''
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "keys are normalised again after they are rotated",
        "language.blocks",
        "k_BxNxKxC = rotate(k_BxNxKxC, *turns_Nxh)",
        "k_BxNxKxC = nn.RMSNorm(self.norm_epsilon, use_scale=False, parent=None).apply("
        "{}, rotate(k_BxNxKxC, *turns_Nxh))",
        (f"{LOGITS}[qwen3]",),
    ),
    Wrong(
        "a constant divisor is that of the rows that were cut",
        "algorithms.group_policy",
        "beyond = ((0, 0), (0, steps - samples.mask.shape[1]))",
        "beyond = ((0, 0), (0, 0))",
        ("test_lengths.py::test_an_update_is_that_of_whole_rows[divided by the budget-1]",),
    ),
    Wrong(
        "whole groups are sorted by row",
        "algorithms.actor_critic",
        "by_length and functools.partial(by_length, in_order=True)",
        "by_length",
        ("test_lengths.py::test_an_update_is_that_of_whole_rows[in groups-1]",),
    ),
]
