"""HunyuanVideo under ComfyUI's dynamic VRAM."""

from __future__ import annotations

from pathlib import Path

import comfy.sd
from comfy.model_patcher import ModelPatcher
from dynamic_vram import on_cpu
from family_contract import LIMIT, lora_of
from hybrid_trt.comfy_model.network import NativeNetwork
from model_families.hunyuan_video import FAMILY, LORA, VIDEO15
from token_calls import Patched, network_of

from sampling import error


def test_under_dynamic_vram_prompts_and_loras_are_natives(models: dict[str, Path], tmp_path: Path) -> None:
    lora = lora_of(network_of(models, VIDEO15), LORA)

    def with_lora(model: ModelPatcher) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0]

    dynamic, native = on_cpu(network_of(models, VIDEO15).patcher), network_of(models, VIDEO15).patcher
    patched = Patched(NativeNetwork.of_model(dynamic, VIDEO15), tmp_path, "torch")
    prompt = FAMILY.prompts["text by byT5"]
    for model, reference in ((patched.model, native), (with_lora(patched.model), with_lora(native))):
        assert error(prompt.sample(model), prompt.sample(reference)) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
