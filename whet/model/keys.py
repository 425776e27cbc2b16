"""Keys of a config.json, which remember that they were read: so that none is silently ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = """
_attn_implementation_autoset _flash_attn_2_enabled _name_or_path _sliding_window_pattern add_cross_attention
architectures attention_dropout attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
is_encoder_decoder is_llama_config label2id layer_norm_epsilon length_penalty max_length min_length
model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
pruned_heads reorder_and_upcast_attn remove_invalid_values repetition_penalty resid_pdrop return_dict
return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
IRRELEVANT = frozenset(NAMES.split())
"""Keys that neither training nor sampling here computes with: names, ids that the tokenizer and generation_config.json
have, initialisation, dropout and load-balancing losses (there are none), memory layout, and heads for other tasks."""
IRRELEVANT_IF = {
    "rope_interleaved": False,  # SmolLM
    "use_mrope": False,  # Qwen2.5
    # Written for all families by transformers or by whet itself.
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Keys that change nothing with this value."""


class Keys(Mapping[str, Any]):
    """A configuration's keys, which remembers those that were read.

    Args:
        data: The parsed object.
        defaults: What a missing key means.
    """

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._data, self._given = {**(defaults or {}), **data}, data
        self.were_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.were_read.add(name)
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def changed(self, **data: Any) -> Keys:
        """Return the keys with other values, for a family that is another one but for them."""
        found = Keys({**self._data, **data})
        found.were_read = self.were_read
        return found

    def fixed(self, **expected: Any) -> None:
        """Refuse keys whose value is neither None nor this one."""
        for name, value in expected.items():
            if self.get(name) is not None and self[name] != value:
                raise ValueError(f"{name} = {str(self[name])[:60]!r} is not supported; expected {value!r}")

    def refuse_unread(self) -> None:
        """Refuse a key with a value that no reader looked at."""
        for name, value in self._given.items():
            is_known = name in self.were_read or name in IRRELEVANT or value is None
            if not is_known and (name not in IRRELEVANT_IF or IRRELEVANT_IF[name] != value):
                raise ValueError(
                    f"key {name[:60]!r} is not known for model_type {self.get('model_type')!r}, and it may change "
                    "what the model computes; delete it if it does not"
                )
