"""The tables of `signatures` for what only the GPU path uses."""

from __future__ import annotations

# `module:name` -> parameter names in order, as in `signatures`.
GPU_NAMES: dict[str, str | None] = {
    "vllm.platforms.interface:Platform.is_cuda": "self",
    "vllm.utils.import_utils:has_triton_kernels": "",
    "vllm._custom_ops": None,
    "vllm._custom_ops:topk_softmax": (
        "topk_weights topk_ids token_expert_indices gating_output renormalize e_score_correction_bias"
    ),
    "vllm._custom_ops:topk_sigmoid": (
        "topk_weights topk_ids token_expert_indices gating_output renormalize e_score_correction_bias "
        "routed_scaling_factor"
    ),
    "vllm._custom_ops:topk_hash_softplus_sqrt": (
        "topk_weights topk_indices token_expert_indices gating_output renormalize routed_scaling_factor "
        "e_score_correction_bias input_tokens hash_indices_table"
    ),
    "vllm.utils.torch_utils:direct_register_custom_op": (
        "op_name op_func mutates_args fake_impl target_lib dispatch_key tags"
    ),
    "vllm.lora.model_manager:LoRAModelManager.activate_adapter": "self lora_id",
    "vllm.lora.model_manager:LoRAModelManager._deactivate_adapter": "self lora_id",
    "vllm.lora.model_manager:LoRAModelManager._get_lora_layer_weights": "self lora_model module_name",
    "vllm.lora.model_manager:LoRAModelManager.lora_slots": None,
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": None,
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA._slice_w13_b": "self w13_lora_b",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA._slice_w2_a": "self w2_lora_a",
    "vllm.lora.layers.fused_moe:FusedMoE3DWithLoRA._slice_w13_b": "self w13_lora_b",
    "vllm.model_executor.layers.fused_moe.activation:MoEActivation": None,
    "vllm.model_executor.layers.fused_moe.activation:MoEActivation.SWIGLUOAI": None,
    "vllm.config:CUDAGraphMode": None,
    "vllm.config:CUDAGraphMode.FULL": None,
    "vllm.config:CUDAGraphMode.PIECEWISE": None,
    "vllm.config:CUDAGraphMode.mixed_mode": "self",
    "vllm.config:VllmConfig": None,
    "vllm.config:VllmConfig._set_cudagraph_sizes": "self",
    "vllm.config:VllmConfig.try_verify_and_update_config": "self",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": None,
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.get_capture_descs": "self",
    "vllm.v1.worker.utils:AttentionGroup": None,
    "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders": (
        "self vllm_config device kernel_block_size num_metadata_builders"
    ),
    "vllm.v1.worker.gpu_worker": None,
    "vllm.v1.worker.gpu_worker:kernel_warmup": "worker",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run": (
        "self num_tokens cudagraph_runtime_mode force_attention uniform_decode allow_microbatching skip_eplb "
        "is_profile create_mixed_batch remove_lora is_graph_capturing num_active_loras profile_seq_lens"
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_remove_all_loras": "self lora_config",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU": "max_num_batched_tokens max_batches device kwargs",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata": (
        "self mapping lora_index_to_id max_loras vocab_size kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_linear": (
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_w13": (
        "self y x lora_a_stacked lora_b_stacked topk_ids topk_weights expert_map w1 w2 num_tokens top_k_num max_loras "
        "adapter_enabled local_num_experts top_k num_slices fully_sharded use_tuned_config add_inputs "
        "token_lora_mapping"
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_w2": (
        "self y x lora_a_stacked lora_b_stacked topk_weights sorted_token_ids_lora expert_ids_lora "
        "num_tokens_post_padded_lora token_lora_mapping num_tokens w1 w2 top_k_num max_loras adapter_enabled top_k "
        "fully_sharded tp_rank use_tuned_config add_inputs"
    ),
}

MXFP4 = "vllm.model_executor.layers.fused_moe.oracle.mxfp4"
OAI = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
# The same for what only experts on OpenAI's Triton kernels use, where vLLM has those.
OAI_NAMES: dict[str, str | None] = {
    OAI: None,
    f"{OAI}:UnfusedOAITritonExperts": None,
    f"{OAI}:UnfusedOAITritonExperts.apply": (
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale "
        "a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
    ),
    f"{OAI}:UnfusedOAITritonExperts.activation": "self activation output input kwargs",
    f"{OAI}:UnfusedOAITritonExperts.adjust_N_for_activation": "N activation",
    f"{OAI}:use_legacy_triton_kernels": None,
    f"{OAI}:make_routing_data": "topk_ids topk_weights num_local_experts",
    f"{OAI}:masked_moe_sum": "intermediate topk_ids output",
    f"{OAI}:triton_kernel_fused_experts": (
        "output_tensor hidden_states w1 w2 routing_data gather_indx scatter_indx topk activation quant_config "
        "swiglu_alpha swiglu_limit apply_router_weight_on_input global_num_experts expert_map intermediate_cache "
        "a1q_scale"
    ),
    f"{OAI}:matmul_ogs": (
        "x w bias routing_data gather_indx scatter_indx precision_config betas gammas out_alpha y fused_activation "
        "epilogue"
    ),
    f"{OAI}:RoutingData": "gate_scal expt_hist n_expts_tot n_expts_act expt_data expected_tokens_per_expt",
    f"{OAI}:GatherIndx": "src_indx dst_indx",
    f"{OAI}:ScatterIndx": "src_indx dst_indx",
    MXFP4: None,
    f"{MXFP4}:_get_priority_backends_for_gpt_oss": "",
    f"{MXFP4}:Mxfp4MoeBackend": None,
    f"{MXFP4}:Mxfp4MoeBackend.TRITON": None,
    f"{MXFP4}:Mxfp4MoeBackend.TRITON_UNFUSED": None,
    "vllm.model_executor.layers.fused_moe.utils:_resize_cache": "x v",
    "triton_kernels.routing:ExptData": "hist token_offs_raw token_offs_pad block_pid_map",
}

# `module:class` -> attributes of its instances.
GPU_ATTRIBUTES: dict[str, str] = {
    "vllm.config:VllmConfig": (
        "additional_config compilation_config lora_config parallel_config scheduler_config num_speculative_tokens "
        "speculative_config"
    ),
    "vllm.config:LoRAConfig": "lora_dtype max_loras",
    "vllm.config:ModelConfig": "enforce_eager hf_text_config",
    "vllm.config:SchedulerConfig": "max_num_batched_tokens max_num_seqs",
    "vllm.config:ParallelConfig": "data_parallel_size tensor_parallel_size world_size",
    "vllm.config:CompilationConfig": (
        "cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_mode cudagraph_specialize_lora compile_sizes "
        "pass_config"
    ),
    "vllm.config:PassConfig": "enable_sp",
    "vllm.forward_context:BatchDescriptor": "num_tokens num_active_loras",
    "vllm.lora.layers.utils:LoRAMapping": "index_mapping prompt_mapping is_prefill",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase": (
        "_token_lora_indices _sampler_indices _sampler_indices_padded _embeddings_indices indices_len is_prefill"
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU": (
        "token_mapping_meta prompt_mapping_meta max_loras lora_config"
    ),
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta": (
        "token_lora_mapping token_indices_sorted_by_lora_ids active_lora_ids num_tokens_per_lora lora_token_start_loc "
        "no_lora_flag_cpu num_active_loras_cpu captured_lora_counts"
    ),
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA": "moe_config _moe_kernel",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel": "fused_experts",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": (
        "activation intermediate_size_per_partition intermediate_size_per_partition_unpadded"
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "lora_config",
    "vllm.v1.worker.worker_base:WorkerBase": "vllm_config model_config parallel_config scheduler_config model_runner",
}

# The same for what only experts on OpenAI's Triton kernels use.
OAI_ATTRIBUTES: dict[str, str] = {
    f"{OAI}:UnfusedOAITritonExperts": "_lora_context quant_config",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEQuantConfig": (
        "w1_bias w2_bias w1_precision w2_precision gemm1_alpha gemm1_clamp_limit"
    ),
    "vllm.model_executor.layers.fused_moe.experts.lora_context:MoELoRAContext": (
        "w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked w2_lora_b_stacked adapter_enabled max_loras "
        "local_num_experts fully_sharded punica_wrapper"
    ),
    f"{OAI}:GatherIndx": "dst_indx",
    f"{OAI}:RoutingData": "gate_scal n_expts_act",
}
