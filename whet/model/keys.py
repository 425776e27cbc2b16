"""Keys of a config.json, which remember that they were read: so that none is silently ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = """
add_cross_attention architectures assistant_confidence_threshold assistant_early_exit
assistant_ensemble_weight assistant_lookbehind attention_dropout attn_implementation attn_pdrop
bad_words_ids begin_suppress_tokens cache_config cache_implementation chunk_size_feed_forward
classifier_dropout compile_config constraints continuous_batching_config cross_attention_hidden_size
disable_compile diversity_penalty do_sample dola_layers dtype early_stopping embd_pdrop
encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff experts_implementation
exponential_decay_length_penalty finetuning_task force_words_ids forced_decoder_ids generation_kwargs
gradient_checkpointing guidance_scale id2label initializer_range is_assistant is_decoder
is_encoder_decoder is_llama_config label2id layer_norm_epsilon length_penalty loss_type low_memory
max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
model_max_length model_type n_ctx name_or_path no_repeat_ngram_size num_assistant_tokens
num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_logits output_router_logits output_scores penalty_alpha prefill_chunk_size
prefix pretraining_tp problem_type prompt_lookup_num_tokens pruned_heads remove_invalid_values
renormalize_logits reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict
return_dict_in_generate return_legacy_cache router_aux_loss_coef router_jitter_noise sequence_bias
speculation_type stop_strings summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj suppress_tokens target_lookbehind task_specific_params temperature
tf_legacy_loss tie_encoder_decoder token_healing tokenizer_class top_h top_k top_p torch_dtype
torchscript transformers.js_config typical_p use_bfloat16 use_cache use_model_defaults use_mtp
use_return_dict watermarking_config
"""
IRRELEVANT = frozenset(NAMES.split())
"""Keys that neither training nor sampling here computes with: names, ids that the tokenizer and generation_config.json
have, generation's defaults (all that transformers' GenerationConfig writes), initialisation, dropout and load-balancing
losses (there are none), memory layout, and heads for other tasks."""
IRRELEVANT_KINDS = re.compile(r"_.*|.*_token_ids?|unsloth_.*|axolotl_.*|transformers.*")
"""More of them: private ones, ids of control tokens, and marks of the tools that wrote the file."""
MAX_SHOWN = 20
IRRELEVANT_IF = {
    "rope_interleaved": False,  # SmolLM
    "use_mrope": False,  # Qwen2.5
    # Written for all families by transformers or by whet itself.
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Keys that change nothing with this value."""
EXPECTED = {
    "a whole number": """
block_dim block_multiple_of conv_L_cache conv_dim conv_dim_out decoder_sparse_step depth ep_size
first_k_dense_replace full_attn_mod global_head_dim head_dim hidden_size hidden_size_per_layer_input
image_seq_length image_token_id image_token_index in_channels in_chans intermediate_size interpolate_factor kv_lora_rank
linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
max_position_embeddings max_window_layers mm_tokens_per_image moe_intermediate_size moe_layer_freq n_embd n_group n_head
n_inner n_layer n_positions n_routed_experts n_shared_experts no_rope_layer_interval num_attention_heads num_channels
num_dense_layers num_experts num_experts_per_tok num_global_key_value_heads num_heads num_hidden_layers
num_key_value_heads num_kv_shared_layers num_labels num_local_experts num_mtp_layers num_nextn_predict_layers
num_position_embeddings original_max_position_embeddings out_hidden_size q_lora_rank qk_nope_head_dim qk_rope_head_dim
scale_factor shared_expert_intermediate_size sliding_window spatial_merge_size top_k_experts topk_group v_head_dim
vocab_size vocab_size_per_layer_input window_size
""",
    "a number": """
attention_factor attention_multiplier attn_logit_softcapping beta_fast beta_slow block_ffn_dim_multiplier
block_norm_eps clip_qkv embedding_multiplier factor final_logit_softcapping high_freq_factor layer_norm_eps
layer_norm_epsilon llama_4_scaling_beta logits_scaling low_freq_factor mscale mscale_all_dim norm_eps
partial_rotary_factor query_pre_attn_scalar residual_multiplier rms_norm_eps rope_local_base_freq rope_theta
routed_scaling_factor swiglu_alpha swiglu_limit
""",
    "true or false": """
attention_bias attention_k_eq_v attn_output_gate block_auto_adjust_ff_dim block_use_swiglu conv_bias
enable_moe_block lm_head_bias mlp_bias multimodal_projector_bias norm_topk_prob qk_layer_norms qkv_bias
reorder_and_upcast_attn rope_interleave scale_attn_by_inverse_layer_idx scale_attn_weights tie_embedding
tie_word_embeddings truncate use_double_wide_mlp use_expert_bias use_mrope use_pos_enc use_qk_norm use_resampler
use_sliding_window
""",
    "a list": """
deepstack_visual_indexes full_attn_idxs fullatt_block_indexes layer_types long_factor mlp_only_layers mrope_section
no_rope_layers short_factor
""",
}
KIND_OF = {name: kind for kind, names in EXPECTED.items() for name in names.split()}
"""What the value of a key is, where it is not null: the types of transformers' configurations."""
_DTYPES = """
auto bfloat16 float16 float32 float64 half float double float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
float8_e8m0fnu float4_e2m1fn_x2 int8 uint8
"""
DTYPES = frozenset(_DTYPES.split())
"""Values of `dtype` and `torch_dtype`. Tensors are read as their files have them; another name is a broken config."""


def _fits(kind: str, value: Any) -> bool:
    """Say whether a value is of a kind of `EXPECTED`."""
    if kind == "a list":
        return isinstance(value, list | tuple)
    if kind == "true or false":
        return isinstance(value, bool) or value in (0, 1)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind == "a number" or math.isfinite(value) and value == int(value))


def check_dtype(data: Mapping[str, Any]) -> None:
    """Refuse a configuration whose dtype is none.

    Raises:
        ValueError: With the key.
    """
    for name in ("dtype", "torch_dtype"):
        value = data.get(name)
        if value is not None and str(value).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} = {shown(value)}: expected a dtype such as 'bfloat16'")


def shown(value: Any) -> str:
    """Return a value as an error shows it."""
    return f"{value!r}"[:60]


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
        if self.get(name) is None and name in self._data and name in KIND_OF:
            raise ValueError(f"{name} = null: expected {KIND_OF[name]}")
        return self._data[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value, which may be null.

        Raises:
            ValueError: If it is of another kind than this key's values are.
        """
        self.were_read.add(name)
        value = self._data.get(name, default)
        if value is not None and name in KIND_OF and not _fits(KIND_OF[name], value):
            raise ValueError(f"{name} = {shown(value)}: expected {KIND_OF[name]}")
        return value

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
        """Refuse keys with values that no reader looked at: all of them at once."""
        unread = [
            f"{name[:60]!r}"
            for name, value in self._given.items()
            if name not in self.were_read
            and name not in IRRELEVANT
            and not IRRELEVANT_KINDS.fullmatch(name)
            and value is not None
            and (name not in IRRELEVANT_IF or IRRELEVANT_IF[name] != value)
        ]
        if unread:
            more = f" and {len(unread) - MAX_SHOWN} more" if len(unread) > MAX_SHOWN else ""
            one = len(unread) == 1
            raise ValueError(
                f"key{'' if one else 's'} {', '.join(unread[:MAX_SHOWN])}{more} {'is' if one else 'are'} not known for "
                f"model_type {self.get('model_type')!r}, and may change what the model computes; delete what does not"
            )
