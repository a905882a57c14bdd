"""Arguments of Megatron-LM that do not change what a trained model computes.

They are of training, data, parallelism, precision and speed, or act only together with an argument
that `arguments.SUPPORTED` rejects. Every other argument of a checkpoint counts as part of the
architecture, also one of a release that this list does not know. Prefixes stand only for subjects
that have no part in the forward pass; arguments of mixtures and attention are listed by name.

Source: `ModelParallelConfig`, `TransformerConfig`, `MLATransformerConfig` and `arguments.py` of the
    releases core 0.4 to 0.19 and of the main branch of August 2026.
"""

import re

_PREFIXES = """
    accumulate_allreduce adam adaptive_muon adlr align_ app_tag async auto_detect autocast
    barrier batch_invariant batch_p2p bert biencoder bucket_size calc_ft check_ checkpoint_
    ckpt_ config_logger consumed cpu_offloading cross_entropy cuda_graph data_ dataloader ddp_
    deallocate decoupled defer_embedding delay_ delta_offload_bytes deprecated deterministic
    dino disable_bf16 disable_jit disable_msc disable_param disable_straggler disable_symmetric
    dist_ckpt distill distrib distribute_saved dump_param empty_unused eval exit_ exp_avg
    export_ fake_process fim_ fine_grained finetune flight_recorder fp4 fp8 freeze fsdp ft_
    full_validation gpu_sniff grad_ gradient grpo gtp_ hetereogenous hierarchical_context
    high_priority hysteresis ict_ img_ indexer inference init_method initial_loss inprocess
    iter_ iteration keep_fp8 kitchen langrl lion load local_rank log_ logging logits_load
    logits_save loss_scale lr_ main_grads main_params manual_gc max_seqlen_per max_tokens_to
    megatron_fsdp merge_file micro_batch microbatch min_loss min_lr min_offloaded mmap mock_data
    modelopt modules_to mtp multiple_valid muon nccl_ no_load no_save no_sync no_weight_decay
    non_persistent null_tokenizer num_buckets num_dataset num_distributed num_microbatches nvtx
    object_storage offload one_logger optimizer otel outer_dp overlap override pad_buckets
    param_name param_sync per_dataset per_split phase_transition pin_cpu pipeline profile
    pytorch_profiler rampup recompute record renormalize_blend replication rerun reset_
    result_rejected retriever retro_ reuse_grad rl_ s3_cache sample_rate save scatter_gather sft
    sgd sharp skip_train skipped soap start_ step_batch store_param straggler strict_fsdp
    suggested swin tensor_parallel tensorboard test_ throughput tiktoken timing titles tokenizer
    torch_fsdp2 tp_comm tp_only train_ use_dist_ckpt use_gloo use_pytorch use_sharp use_torch_
    valid vision vocab_ wandb wd_ weight_decay wgrad world_size
"""
_NAMES = """
    _cpu_offloading_context _is_global_batch_size_explicitly_specified
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    activation_func_fp8_input_store activation_offload_fraction add_position_embedding
    allow_ambiguous_pad_tokens allow_transformer_engine apply_query_key_layer_scaling
    apply_rope_fusion apply_wd_to_qk_layernorm attention_backend attention_softmax_in_fp32
    average_in_collective batch_size bf16 bias_activation_fusion bias_dropout_fusion
    bias_swiglu_fusion block_data_path calculate_per_token_loss chat_template classes_fraction
    clip_grad clone_scatter_output_in_embedding context_parallel_size cp_comm_type
    create_all_gather_group create_attention_mask_in_dataloader curr_iteration
    decode_only_cuda_graphs decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    decoder_seq_length decrease_batch_size_if_needed disable_chunked_prefill do_test do_train
    do_valid embedding_init_method embedding_init_method_std embedding_path enable_autocast
    enable_chunked_prefill enable_cuda_graph enable_experimental enable_ft_package
    enable_full_sharding_in_hsdp enable_gloo_process_groups enable_msc enable_one_logger
    encoder_num_layers encoder_pipeline_model_parallel_size encoder_seq_length
    encoder_tensor_model_parallel_size end_weight_decay eod_mask_loss
    ep_overlap_early_attn_memory_release error_injection_rate error_injection_type
    evidence_data_path expert_gtp_weight_remat_size expert_model_parallel_size
    expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size external_cuda_graph
    filter_warnings finalize_model_grads_func first_last_layers_bf16 first_pipeline_num_layers
    flash_attention_version flash_decode fp16 fp16_lm_cross_entropy fp32_residual_connection
    fully_parallel_load fully_parallel_save fused_residual_rmsnorm fused_single_qkv_rope
    global_batch_size head_lr_mult hybrid_context_parallel init_model_with_meta_device
    last_pipeline_num_layers lazy_mpu_init legacy_tokenizer logit_dtype lr
    make_vocab_size_divisible_by mask_factor mask_prob mask_type masked_softmax_fusion
    memory_efficient_layer_norm memory_keys memory_profile memory_profile_path
    memory_snapshot_path metadata_path mid_level_dataset_surplus mlp_chunks_for_prefill
    mlp_chunks_for_training model_parallel_size model_type most_recent_k no_persist_layer_norm
    num_channels num_classes num_floating_point_operations_so_far num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_layers_per_virtual_pipeline_stage
    num_speculative_tokens num_virtual_stages_per_pipeline_rank num_workers
    offset_sampling_seed_by_dp_rank onnx_safe output_bert_embeddings output_layer_init_method
    pad_vocab_size padded_vocab_size params_dtype patch_dim perform_initialization
    perform_rl_step persist_layer_norm prefill_chunk_size pretrained_checkpoint qad_train_target
    qk_clip qk_clip_alpha qk_clip_threshold quant_recipe query_in_block_prob rank refit_method
    relative_attention_max_distance relative_attention_num_buckets return_log_probs
    run_workload_inspector_server runtime_time_unit seed seq_length sequence_parallel
    set_level_for_all_loggers short_seq_prob skip_prompt_log_probs special_tokens split
    standalone_embedding_stage stream_ckpt_dequant symmetric_ar_type te_precision_config_file
    te_rng_tracker teacher_model_config tensor_model_parallel_size timers to_test
    transformer_impl transformer_pipeline_model_parallel_size trust_remote_code
    use_checkpoint_args use_checkpoint_opt_param_scheduler use_cpu_initialization
    use_custom_fsdp use_distributed_optimizer use_flash_attn use_flashinfer_fused_rope
    use_gigatoken use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
    use_inference_optimized_layers use_kitchen use_kitchen_attention
    use_layer_wise_distributed_optimizer use_layer_wise_param_layout use_legacy_models
    use_legacy_static_engine use_mcore_models use_megatron_fsdp use_mp_args_from_checkpoint_args
    use_nsys_profiler use_one_sent_docs use_persistent_ckpt_worker use_precision_aware_optimizer
    use_ring_exchange_p2p use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
    use_tp_pp_dp_mapping variable_seq_lengths verify_integrity
    virtual_pipeline_model_parallel_size warmup yaml_cfg
"""
# of mixtures: balancing in training, and how tokens travel
_MOE = """
    aux_loss_coeff combine_bwd_dtype deepep_num_sms dispatch_fwd_dtype enable_deepep
    enable_routing_replay extended_tp flex_dispatcher_backend flex_dispatcher_num_sms
    grad_scale_func grouped_gemm hybridep_num_blocks_permute hybridep_num_blocks_unpermute
    hybridep_num_sms hybridep_num_sms_preprocessing hybridep_pad_uneven_dispatch_inputs
    layer_recompute ncclep_static_shape ncclep_zero_copy pad_expert_input_to_capacity
    pad_experts_for_cuda_graph_inference paged_stash paged_stash_buffer_size_factor_cpu
    paged_stash_buffer_size_factor_cuda paged_stash_page_size per_layer_logging permute_fusion
    permute_fusion_into_hybridep router_bias_update_rate router_dtype router_fusion
    router_padding_for_fp8 router_padding_for_quantization router_quantile_balancing_ema
    routing_trace_capture_hidden_states routing_trace_capture_logits routing_trace_dump_weights
    routing_trace_max_training_iters routing_trace_path shared_expert_overlap
    single_grouped_bias single_grouped_weight token_dispatcher_type token_drop_policy
    token_dropping upcycling_granularity use_grouped_tensor use_legacy_grouped_gemm
    use_upcycling z_loss_coeff
"""
# without effect unless an argument that SUPPORTED rejects switches on multi-latent, sparse or
# windowed attention, a hybrid model, hyper-connections or YaRN
_SWITCHED_OFF = """
    beta_fast beta_slow cache_mla_latents disable_mamba_mem_eff_path dsa_indexer_head_dim
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff
    dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
    dsa_indexer_use_sparse_loss dsa_kernel_backend
    experimental_attention_variant_loss_scale_func gdp_cutedsl_kernel
    gdp_num_chunk_states_to_recompute gdp_num_householder kv_lora_rank linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mamba_head_dim mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    mamba_num_groups mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype
    mhc_init_gating_factor mhc_num_residual_streams mhc_recompute_layer_num
    mhc_sinkhorn_iterations mla_down_proj_fusion mrope_section mscale mscale_all_dim
    original_max_position_embeddings q_lora_rank qk_head_dim qk_pos_emb_head_dim
    rotary_scaling_factor use_fused_weighted_squared_relu use_mamba_mem_eff_path v_head_dim
    window_attn_skip_freq yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
    yarn_original_max_position_embeddings
"""

HARMLESS = re.compile(
    "|".join(
        [
            *(f"{prefix}.*" for prefix in _PREFIXES.split()),
            *_NAMES.split(),
            *(f"moe_{name}" for name in _MOE.split()),
            *_SWITCHED_OFF.split(),
        ]
    )
)
