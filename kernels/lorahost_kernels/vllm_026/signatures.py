"""Every name of vLLM that this package uses, with the parameters it expects; checked before anything is patched.

A test compares the table with what the code of this package really uses, so that it stays complete.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from vllm.utils.import_utils import has_triton_kernels

from lorahost_kernels.vllm_026.gpu_names import GPU_ATTRIBUTES, GPU_NAMES, OAI_ATTRIBUTES, OAI_NAMES
from lorahost_kernels.vllm_026.patching import PluginError

VLLM_VERSION = "0.26.0"

# `module:name` -> parameter names in order; None where only the existence counts (data, properties, classes that
# we don't construct).
COMMON_NAMES: dict[str, str | None] = {
    "vllm:__version__": None,
    "vllm.config:get_current_vllm_config_or_none": "",
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cpu": "self",
    "vllm.lora.lora_model:PIN_MEMORY": None,
    "vllm.lora.lora_model:LoRAModel.__init__": "self lora_model_id rank loras is_3d_lora_weight",
    "vllm.lora.request:LoRARequest": (
        "lora_name lora_int_id lora_path base_model_name tensorizer_config_dict load_inplace is_3d_lora_weight"
    ),
    "vllm.lora.worker_manager:WorkerLoRAManager": None,
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": "self lora_request",
    "vllm.lora.worker_manager:WorkerLoRAManager.list_adapters": "self",
    "vllm.lora.worker_manager:WorkerLoRAManager.remove_adapter": "self adapter_id",
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager": None,
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter": "self lora_request",
    "vllm.lora.model_manager:LoRAModelManager": None,
    "vllm.lora.layers.base:BaseLayerWithLoRA": None,
    "vllm.lora.model_manager:LoRAModelManager._create_lora_modules": "self",
    "vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace": "self lora_model",
    "vllm.lora.model_manager:LoRAModelManager._stack_moe_lora_weights": "self lora_model module module_name",
    "vllm.lora.model_manager:LoRAModelManager.list_adapters": "self",
    "vllm.lora.model_manager:LoRAModelManager.remove_adapter": "self adapter_id",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA": None,
    "vllm.lora.layers.fused_moe:FusedMoE3DWithLoRA": None,
}

# The same for what only the CPU path uses.
CPU_NAMES: dict[str, str | None] = {
    "vllm.platforms.cpu:CpuPlatform.get_punica_wrapper": "",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": ("max_num_batched_tokens max_batches device kwargs"),
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata": (
        "self mapping lora_index_to_id max_loras vocab_size kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.token_lora_indices": None,
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.sampler_indices": None,
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear": (
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_shrink": "self y x lora_a_stacked scale kwargs",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_expand": (
        "self y x lora_b_stacked output_slices offset_start add_inputs kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_embedding": (
        "self y x lora_b_stacked add_inputs kwargs"
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits": (
        "self y x lora_a_stacked lora_b_stacked scale buffer kwargs"
    ),
    "vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping": "self punica_wrapper",
    "vllm.lora.layers.utils:_get_lora_device": "base_layer",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA.__init__": "self base_layer",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA.set_mapping": "self punica_wrapper",
    "vllm.lora.layers.fused_moe:FusedMoE3DWithLoRA.__init__": "self base_layer",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:_CPU_MOE_ACT_FN": None,
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE": None,
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.check_grouped_gemm": "self layer",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts": (
        "hidden_states router_logits top_k use_grouped_topk renormalize topk_group num_expert_group "
        "custom_routing_function scoring_func routed_scaling_factor e_score_correction_bias"
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": "moe",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.is_monolithic": None,
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.create_weights": (
        "self layer num_experts hidden_size intermediate_size_per_partition params_dtype extra_weight_attrs"
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config": (
        "self layer"
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply_monolithic": (
        "self layer x router_logits input_ids"
    ),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._replace_quant_method": ("self quant_method"),
}

# `module:class` -> attributes of its instances, which only its source shows.
COMMON_ATTRIBUTES: dict[str, str] = {
    "vllm.lora.worker_manager:WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager:LoRAModelManager": "modules packed_modules lora_index_to_id",
    "vllm.lora.lora_model:LoRAModel": "loras",
    "vllm.lora.lora_weights:LoRALayerWeights": "lora_a lora_b",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": "lora_a_stacked lora_b_stacked tp_size",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA": (
        "base_layer w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked w2_lora_b_stacked tp_size"
    ),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": "gate",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": "lora_manager",
    "vllm.v1.worker.worker_base:WorkerBase": "device model_runner",
}

# The same for what only the CPU path uses.
CPU_ATTRIBUTES: dict[str, str] = {
    "vllm.lora.layers.base:BaseLayerWithLoRA": "punica_wrapper",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA": (
        "adapter_enabled device enable_moe_shared_loras local_num_experts moe_config "
        "n_slices tp_rank _shared_experts _w13_slices"
    ),
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": (
        "is_act_and_mul is_lora_enabled moe_parallel_config"
    ),
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig": "tp_rank tp_size use_ep",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": "moe",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": (
        "routed_experts moe_config layer_name _shared_experts"
    ),
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": (
        "quant_method lora_base_layer_prefix local_num_experts activation apply_router_weight_on_input "
        "top_k use_grouped_topk renormalize topk_group num_expert_group custom_routing_function "
        "scoring_func routed_scaling_factor e_score_correction_bias"
    ),
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE": "gate_up_linear down_linear",
}


def check_signatures(cpu: bool) -> None:
    """Compares the tables with the installed vLLM: the common ones, and the CPU's or the GPU's.

    Raises:
        PluginError: with one line per name that is missing or differs.
    """
    problems = [*_name_problems(COMMON_NAMES), *_attribute_problems(COMMON_ATTRIBUTES)]
    names, attributes = (CPU_NAMES, CPU_ATTRIBUTES) if cpu else (GPU_NAMES, GPU_ATTRIBUTES)
    problems += [*_name_problems(names), *_attribute_problems(attributes)]
    if not cpu and has_triton_kernels():
        problems += [*_name_problems(OAI_NAMES), *_attribute_problems(OAI_ATTRIBUTES)]
    if problems:
        raise PluginError(f"this vLLM is not the {VLLM_VERSION} that lorahost's plugin knows:\n" + "\n".join(problems))


def resolve(name: str) -> Any:
    """The object that `module` or `module:qualified.name` stands for; AttributeError or ImportError without one."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def _name_problems(names: dict[str, str | None]) -> Iterator[str]:
    for name, expected in names.items():
        try:
            found = resolve(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: missing ({error})"
            continue
        if expected is None:
            continue
        actual = " ".join(inspect.signature(found).parameters)
        if actual != expected:
            yield f"{name}: expected the parameters ({expected}), found ({actual})"


def _attribute_problems(table: dict[str, str]) -> Iterator[str]:
    for name, attributes in table.items():
        try:
            source = _class_source(resolve(name))
        except (ImportError, AttributeError, OSError) as error:
            yield f"{name}: missing ({error})"
            continue
        for attribute in attributes.split():
            if not re.search(
                rf"\b(self|layer)\.{attribute}\b|def {attribute}\(|^    {attribute}: ", source, re.MULTILINE
            ):
                yield f"{name}: attribute {attribute} is gone"


def _class_source(cls: type) -> str:
    """Source of a class and of its bases inside vLLM, and inside the Triton kernels that it carries."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith(("vllm", "triton_kernels"))]
    return "\n".join(inspect.getsource(base) for base in bases)
