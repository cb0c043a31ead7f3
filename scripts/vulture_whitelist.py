"""Names that vulture sees no use of, and who uses them; ``make lint`` reads this file.

A name stays here only as long as the reason holds. Everything else that is unused goes.
"""

# fairseq calls these methods and reads these attributes of models
_.add_args
_.build_decoder
_.build_decoder_layer
_.build_encoder_layer
_.build_self_attention
_.buffered_future_mask
_.embedding_dim
_.forward_torchscript
_.hub_models
_.make_generation_fast_
_.max_source_positions
_.no_scale_embedding
_.reorder_incremental_state

# fairseq passes these arguments by name, or with a position that they keep
_.add_bias_kv
_.add_zero_attn
_.combine
_.src_lengths2
_.static_kv

# fairseq reads these options of configurations, through TransformerConfig or its own classes
_.add_bos_token
_.attention_window
_.encoder_attention_heads
_.encoder_layerdrop
_.encoder_learned_pos
_.encoder_normalize_before
_.ffn_reg_scale_factor
_.load_checkpoint_heads
_.mha_reg_scale_factor
_.pooler_activation_fn
_.pooler_dropout
_.quant_noise_scalar
_.spectral_norm_classification_head
_.untie_weights_roberta

# fairseq calls these methods of tasks and datasets, and reads these attributes
_._frozen_batches
_.can_reuse_epoch_itr_across_epochs
_.get_checkpoint_dict
_.max_len_a
_.max_len_b
_.num_tokens_vec
_.ordered_indices
_.set_checkpoint_dict

# transformers calls these methods of models and caches, and reads these attributes
_._init_weights
_.auto_map
_.base_model_prefix
_.batch_repeat_interleave
_.batch_select_indices
_.config_class
_.get_input_embeddings
_.get_mask_sizes
_.get_max_cache_shape
_.get_output_embeddings
_.is_compileable
_.is_croppable
_.is_sliding
_.lazy_initialization
_.main_input_name
_.post_processor
_.pre_tokenizer
_.prefetch
_.set_input_embeddings
_.set_output_embeddings
_.supports_early_init
_.tie_word_embeddings

# torch, Triton and pickle: part of an interface
_.align
_.get_current_device
_.get_current_stream
_.get_current_target
_.memo
_.num_batches_tracked

# commands that the program of lrpe_fairseq.experiments names as text
_.classifier
_.eval_glue
_.finetune
_.mt
_.score_lm

# the fields of a table's section slurm, read by their names
_.account
_.mem
_.qos

# the gallery and the property suite read these of every encoding
_.cost
_.equation
_.host_reads
_.shared_by_stacks
_.shift_unit

# naive forms and lists that tests compare with
_.COMPOSED_NAMES
_.WANTED
_.losses_naive

# for code that prepares trees (docs/running.md)
_.codes_from_arities
_.concat

# fairseq reads these of a configuration that torchrun has filled in
_.ddp_backend
_.device_id
_.distributed_backend
_.distributed_rank
_.distributed_world_size

# transformers reads these of a converted model
_.architectures
_.is_quantized

# the key of a cache: the file is read again after it was modified
_.modified

# torch._dynamo reads it
_._dynamo_marked_constant

# the type of an argument, written as text
_.Find

# fairseq.utils reads it
_.multi_tensor_total_norm
