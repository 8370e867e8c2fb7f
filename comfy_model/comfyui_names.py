"""Names in ComfyUI's own code that the pack relies on, by the feature that needs them. ``comfyui_internals`` reads it.

A name is ``module:name``, with the arguments that are given. ``_`` is an argument of any name, ``...`` stands for
further arguments that need not be given. A name with ``?`` may be missing.
"""

from __future__ import annotations

from enum import Enum


class Feature(Enum):
    """A feature that can be switched off: its name, and what happens without it."""

    ENGINES = "engines", "everything runs at normal speed"
    STACKS = "ControlNets side by side", "they run one after another"
    HINTS = "kept control images", "ComfyUI makes them anew in each run"
    SEVERAL_GPUS = "engines on several GPUs at once", "shared steps run at normal speed"
    STAGING = "model weights that wait in main memory", "ComfyUI loads them before each run"
    STAGED_ONCE = "model weights that are staged once for many runs", "they are staged for each run"
    ON_DEVICE = "prompts that are copied to the GPU once", "they are copied in each step"
    PROMPTS = "prompts that are encoded once per run", "they are encoded in each step"
    STREAMS = "streams in one sampling", "each frame is a sampling of its own"
    FRAME_NODES = "nodes that run for each frame", "TRT Stream refuses TRT Frame"
    GRAPHS = "CUDA graphs", "networks are launched kernel by kernel"
    COMPILED_NATIVE = "normal models compiled by another node", "they run as they are"
    QUEUE = "readings of ComfyUI's queue", "nothing is known of prompts that wait or run"
    BUILDS = "builds in ComfyUI", "engines are built by the command line alone"
    WHOLE_GRAPHS = "builds for a workflow on the command line", "it builds for single models alone"
    STREAMED = "weights streamed from main memory", "models larger than the GPU run at normal speed"
    WARMING = "workflows that warm a worker", "its first prompt opens the engines"


TABLE: dict[Feature, tuple[str, ...]] = {
    Feature.ENGINES: (
        "comfy.model_patcher:ModelPatcher.__init__(self, _, load_device, offload_device, ...)",
        "comfy.model_patcher:ModelPatcher.clone(self, ...)",
        "comfy.model_patcher:ModelPatcher.is_clone(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.is_dynamic(self, ...)",
        "comfy.model_patcher:ModelPatcher.model_size(self, ...)",
        "comfy.model_patcher:ModelPatcher.loaded_size(self, ...)",
        "comfy.model_patcher:ModelPatcher.load(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.partially_load(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.partially_unload(self, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.detach(self, ...)",
        "comfy.model_patcher:ModelPatcher.current_loaded_device(self, ...)",
        "comfy.model_patcher:ModelPatcher.model_patches_models(self, ...)",
        "comfy.model_patcher:ModelPatcher.get_key_patches(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.get_model_object(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.eject_model(self, ...)",
        "comfy.model_patcher:ModelPatcher.unpatch_model(self, _, unpatch_weights, ...)",
        "comfy.model_patcher:ModelPatcher.get_wrappers(self, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.add_wrapper_with_key(self, _, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.remove_wrappers_with_key(self, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.add_callback_with_key(self, _, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.remove_callbacks_with_key(self, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.set_additional_models(self, _, _, ...)",
        "comfy.model_patcher:ModelPatcher.patches",
        "comfy.model_patcher:ModelPatcher.patches_uuid",
        "comfy.model_patcher:ModelPatcher.object_patches",
        "comfy.model_patcher:ModelPatcher.object_patches_backup",
        "comfy.model_patcher:ModelPatcher.hook_patches",
        "comfy.model_patcher:ModelPatcher.current_hooks",
        "comfy.model_patcher:ModelPatcher.forced_hooks",
        "comfy.model_patcher:ModelPatcher.injections",
        "comfy.model_patcher:ModelPatcher.weight_wrapper_patches",
        "comfy.model_patcher:ModelPatcher.current_weight_patches_uuid",
        "comfy.model_patcher:ModelPatcher.model_loaded_weight_memory",
        "comfy.model_patcher:ModelPatcher.current_patcher",
        "comfy.patcher_extension:WrappersMP.DIFFUSION_MODEL",
        "comfy.patcher_extension:WrappersMP.OUTER_SAMPLE",
        "comfy.patcher_extension:CallbacksMP.ON_PRE_RUN",
        "comfy.patcher_extension:WrapperExecutor.original",
        "comfy.patcher_extension:WrapperExecutor.class_obj",
        "comfy.model_management:load_models_gpu(_, memory_required, _, minimum_memory_required, ...)",
        "comfy.model_management:loaded_models(only_currently_used, ...)",
        "comfy.model_management:current_loaded_models",
        "comfy.model_management:LoadedModel.currently_used",
        "comfy.model_management:LoadedModel.device",
        "comfy.model_management:LoadedModel.model",
        "comfy.model_management:free_memory(_, _, keep_loaded, ...)",
        "comfy.model_management:minimum_inference_memory(...)",
        "comfy.model_management:extra_reserved_memory(...)",
        "comfy.model_management:soft_empty_cache(...)",
        "comfy.model_management:is_device_cpu(_, ...)",
        "comfy.model_management:is_oom(_, ...)",
        "comfy.samplers:CFGGuider.conds", "comfy.samplers:CFGGuider.model_patcher",
        "comfy.controlnet:ControlNet.copy(self, ...)",
        "comfy.controlnet:ControlNet.control_model", "comfy.controlnet:ControlNet.control_model_wrapped",
        "comfy.controlnet:ControlNet.manual_cast_dtype",
        "comfy.ops:mixed_precision_ops(...)", "comfy.ops:manual_cast", "comfy.quant_ops:QUANT_ALGOS",
        "comfy.lora:calculate_weight(_, _, _, ...)",
        "comfy.float:stochastic_rounding(_, _, seed, ...)",
        "comfy.utils:string_to_seed(_, ...)",
        "comfy.model_management:cast_to_device(_, _, _, copy, ...)",
        "comfy.model_management:lora_compute_dtype(_, ...)",
        "comfy.model_management:module_size(_, ...)",
        "comfy.quant_ops:QuantizedTensor",
        "comfy_execution.utils:get_executing_context(...)",
        "comfy_execution.graph:DynamicPrompt.get_node(self, _, ...)",
        "comfy_execution.graph:NodeNotFoundError",
        "folder_paths:models_dir",
        "folder_paths:add_model_folder_path(_, _, ...)",
        "folder_paths:get_folder_paths(_, ...)",
    ),
    Feature.STACKS: (
        "comfy.patcher_extension:WrappersMP.CALC_COND_BATCH",
        "comfy.samplers:_calc_cond_batch(_, _, _, _, _)",
        "comfy.controlnet:StrengthType.CONSTANT",
        "comfy.controlnet:broadcast_image_to(_, _, _)",
        "comfy.controlnet:ControlNet.get_control(self, _, _, _, _, _)",
        "comfy.controlnet:ControlNet.control_merge(self, _, _, _)",
        "comfy.controlnet:ControlNet.model_sampling_current",
        "comfy.controlnet:ControlNet.previous_controlnet",
        "comfy.controlnet:ControlNet.timestep_range",
        "comfy.controlnet:ControlNet.cond_hint", "comfy.controlnet:ControlNet.vae",
        "comfy.controlnet:ControlNet.latent_format",
        "comfy.controlnet:ControlNet.extra_hooks", "comfy.controlnet:ControlNet.extra_concat_orig",
        "comfy.controlnet:ControlNet.multigpu_clones", "comfy.controlnet:ControlNet.global_average_pooling",
        "comfy.controlnet:ControlNet.strength_type", "comfy.controlnet:ControlNet.strength",
        "comfy.controlnet:ControlNet.extra_args", "comfy.controlnet:ControlNet.extra_conds",
        "comfy.controlnet:ControlNet.compression_ratio",
    ),
    Feature.HINTS: (
        "comfy.utils:common_upscale(_, _, _, _, _)",
        "comfy.controlnet:ControlNet.cond_hint_original",
        "comfy.controlnet:ControlNet.upscale_algorithm",
        "comfy.controlnet:ControlNet.preprocess_image",
        "comfy.controlnet:ControlNet.concat_mask",
    ),
    Feature.SEVERAL_GPUS: (
        "comfy.patcher_extension:CallbacksMP.ON_MATCH_MULTIGPU_CLONES",
        "comfy.patcher_extension:WrappersMP.PREPARE_SAMPLING", "comfy.controlnet:ControlNet.previous_controlnet",
        "comfy.patcher_extension:CallbacksMP.ON_CLEANUP", "comfy.model_patcher:ModelPatcher.clone_base_uuid",
        "comfy.model_patcher:ModelPatcher.match_multigpu_clones(self, ...)",
        "comfy.model_management:get_all_torch_devices(...)",
        "comfy.multigpu:create_multigpu_deepclones(_, _, _, reuse_loaded, ...)",
        "comfy.model_patcher:ModelPatcher.get_clone_model_override(self, ...)",
        "comfy.model_patcher:ModelPatcher.get_additional_models_with_key(self, _, ...)",
        "comfy.model_management:unload_model_and_clones(_, ...)",
    ),
    Feature.STAGING: (
        "comfy.patcher_extension:WrappersMP.PREPARE_SAMPLING",
        "comfy.patcher_extension:CallbacksMP.ON_CLEANUP",
        "comfy.sampler_helpers:_prepare_sampling(_, _, _, model_options, force_full_load, force_offload)",
        "comfy.sampler_helpers:estimate_memory(_, _, _, ...)",
        "comfy.sampler_helpers:get_additional_models(_, _, ...)",
        "comfy.controlnet:ControlLora",
        "comfy.model_patcher:ModelPatcher.use_ejected(self, skip_and_inject_on_exit_only, ...)",
        "comfy.model_patcher:ModelPatcher.patch_model(self, _, _, load_weights, ...)",
        "comfy.model_patcher:ModelPatcher.get_additional_models_with_key(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.model_dtype(self, ...)",
        "comfy.model_patcher:ModelPatcher.model_lowvram",
        "comfy.model_patcher:ModelPatcher.parent",
    ),
    Feature.STREAMED: (
        "comfy.model_management:minimum_inference_memory(...)",
        "comfy.model_management:pin_memory(_, ...)",
        "comfy.model_management:unpin_memory(_, ...)",
        "comfy.model_patcher:ModelPatcher.partially_unload_ram(self, _, ...)",
    ),
    Feature.STAGED_ONCE: (
        "comfy.patcher_extension:CallbacksMP.ON_LOAD",
        "comfy.utils:get_attr(_, _, ...)",
        "comfy.model_patcher:ModelPatcher.get_all_callbacks(self, _, ...)",
        "comfy.model_patcher:ModelPatcher.backup",
        "comfy.model_patcher:ModelPatcherDynamic._vbar_get(self, ...)",
        "comfy.model_patcher:ModelPatcherDynamic.dynamic_pins",
    ),
    Feature.ON_DEVICE: (
        "comfy.conds:CONDRegular._copy_with(self, _, ...)",
        "comfy.conds:CONDRegular.cond",
        "comfy.conds:CONDNoiseShape", "comfy.conds:CONDCrossAttn",
        "comfy.samplers:CFGGuider.model_options",
        "comfy.model_patcher:ModelPatcher.get_additional_models_with_key(self, _, ...)",
        "comfy.patcher_extension:WrappersMP.CALC_COND_BATCH",
        "comfy.samplers:_calc_cond_batch(_, _, _, _, _)",
    ),
    Feature.PROMPTS: (
        "comfy.conds:CONDRegular._copy_with(self, _, ...)",
        "comfy.conds:CONDRegular.concat(self, _, ...)",
        "comfy.conds:CONDRegular.process_cond(self, batch_size, **)",
        "comfy.conds:CONDCrossAttn.concat(self, _, ...)",
        "comfy.model_base:BaseModel._apply_model(self, _, _, _, _, ...)",
        "comfy.model_base:BaseModel.get_dtype_inference(self, ...)",
        "comfy.patcher_extension:WrappersMP.APPLY_MODEL",
        "comfy.patcher_extension:WrappersMP.CALC_COND_BATCH",
        "comfy.samplers:_calc_cond_batch(_, _, _, _, _)",
    ),
    Feature.STREAMS: (
        "comfy.samplers:CFGGuider.set_conds(self, _, _, ...)",
        "comfy.samplers:CFGGuider.sample(self, _, _, _, _, ...)",
        "comfy.samplers:CFGGuider.original_conds",
        "comfy.samplers:CFGGuider.inner_model",
        "comfy.samplers:process_conds(_, _, _, _, _, _, _, latent_shapes, ...)",
        "comfy.samplers:sampler_object(_, ...)",
        "comfy.samplers:KSAMPLER.sample(self, _, _, _, _, _, _, _, _, ...)",
        "comfy.samplers:KSAMPLER.max_denoise(self, _, _, ...)",
        "comfy.samplers:KSampler.__init__(self, _, _, _, _, _, _, _, ...)",
        "comfy.sampler_helpers:cond_has_hooks(_, ...)",
        "comfy.model_patcher:ModelPatcher.get_free_memory(self, _, ...)",
        "comfy.samplers:encode_model_conds(_, _, _, _, _, **)",
        "comfy.model_base:BaseModel.extra_conds(self, **)",
        "comfy.model_base:BaseModel.process_latent_in(self, _, ...)",
        "comfy.model_base:BaseModel.process_latent_out(self, _, ...)",
        "comfy.model_management:raise_non_oom(_, ...)",
        "comfy.sd:VAE.first_stage_model",
        "comfy.sd:VAE.vae_dtype",
        "comfy.sd:VAE.latent_dim",
        "comfy.sd:VAE.extra_1d_channel",
        "comfy.sd:VAE.format_encoded",
        "comfy.sd:VAE.process_input",
        "comfy.sd:VAE.vae_encode_crop_pixels(self, _, ...)",
        "comfy.sd:VAE.vae_output_dtype(self, ...)",
    ),
    Feature.FRAME_NODES: (
        "execution:get_input_data(inputs, class_def, unique_id, _, dynprompt, ...)",
        "execution:get_output_data(prompt_id, unique_id, obj, input_data_all, _, _, v3_data, ...)",
    ),
    Feature.GRAPHS: ("comfy.model_prefetch:?pause_malloc_graph(sync, ...)",),
    Feature.COMPILED_NATIVE: ("comfy_api.torch_helpers.torch_compile:TORCH_COMPILE_KWARGS",),
    Feature.QUEUE: (
        "execution:PromptQueue.get_current_queue_volatile(self, ...)",
        "comfy_execution.progress:global_progress_registry",
        "comfy_execution.progress:ProgressRegistry.nodes",
        "comfy_execution.progress:ProgressRegistry.prompt_id",
        "comfy_execution.progress:NodeState.Running",
    ),
    Feature.BUILDS: (
        "execution:PromptQueue.get_flags(self, reset, ...)",
        "execution:PromptQueue.set_flag(self, _, _, ...)",
        "execution:PromptQueue.get_tasks_remaining(self, ...)",
        "comfy.model_management:unload_all_models(...)",
        "comfy.model_management:throw_exception_if_processing_interrupted(...)",
        "comfy.utils:ProgressBar.__init__(self, _, node_id, ...)",
        "comfy.utils:ProgressBar.update_absolute(self, _, ...)",
    ),
    Feature.WHOLE_GRAPHS: (
        "execution:PromptExecutor.__init__(self, _, cache_type, cache_args, ...)",
        "execution:PromptExecutor.execute(self, _, _, _, _, ...)",
        "execution:validate_prompt(_, _, _, ...)",
    ),
    Feature.WARMING: ("execution:validate_prompt(_, _, _, ...)", "execution:PromptQueue.put(self, _, ...)",
                      "execution:PromptQueue.get_history(self, prompt_id, ...)"),
}

COMPUTED_HERE_TOO = {
    "comfy.controlnet:ControlNet.get_control": frozenset(
        "ValueError append broadcast_image_to calculate_input cast_to_device cat comfy "
        "common_upscale compression_ratio cond_hint cond_hint_original cond_hints control_merge control_model "
        "convert_tensor copy device dtype encode extra_args extra_concat_orig extra_conds get get_control iter "
        "latent_format len load_models_gpu loaded_models manual_cast_dtype model_base model_management "
        "model_sampling_current movedim ndim next pop preprocess_image previous_controlnet process_in "
        "repeat_to_batch_size shape spacial_compression_encode timestep timestep_range to torch unsqueeze "
        "upscale_algorithm utils vae".split()
    ),
    "comfy.controlnet:ControlNet.control_merge": frozenset(
        "CONSTANT LINEAR_UP StrengthType add append dtype float global_average_pooling len mean range repeat set shape "
        "strength strength_type to torch".split()
    ),
}
"""ComfyUI's functions that ``control_stack`` repeats, with all names that they use."""
