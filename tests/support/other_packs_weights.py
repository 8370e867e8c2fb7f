"""Stands for packs that load models whose weights ComfyUI cannot read by itself: GGUF files, and bitsandbytes' NF4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import comfy.lora
import comfy.ops
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy_kitchen.tensor import BaseLayoutParams, QuantizedLayout, QuantizedTensor, register_layout_class

BLOCK = 32
"""Numbers that share a scale."""


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A weight as blocks of bytes: a scale in half precision, then 8 bits a number."""
    values = weight.to(torch.float32).reshape(-1, BLOCK)
    scale = (values.abs().amax(1, keepdim=True) / 127).to(torch.float16)
    whole = (values / scale.to(torch.float32).clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), whole.view(torch.uint8)], 1)


def out_of_blocks(blocks: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``in_blocks``, within its rounding."""
    plain = blocks.as_subclass(torch.Tensor).reshape(-1, BLOCK + 2)
    scale = plain[:, :2].contiguous().view(torch.float16).to(torch.float32)
    return (plain[:, 2:].contiguous().view(torch.int8).to(torch.float32) * scale).reshape(shape).to(dtype)


class GGMLTensor(torch.Tensor):
    """Blocks that tell the shape of the weight in them, and cannot be copied."""

    tensor_shape: torch.Size | None = None
    patches: tuple[list, str] | None = None
    """Those of LoRAs, and the weight's name: its layer adds them to what it reads."""

    @property
    def shape(self) -> torch.Size:
        return self.tensor_shape or self.size()

    def to(self, *args: object, **kwargs: object) -> torch.Tensor:
        moved = super().to(*args, **kwargs)
        moved.tensor_shape = self.tensor_shape
        return moved

    def clone(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        return self

    def detach(self) -> torch.Tensor:
        return self


class GGMLLayer(torch.nn.Module):
    """A layer that reads its blocks with each call; its state names one thing more than it has."""

    comfy_cast_weights = True

    def _load_from_state_dict(self, state: dict, prefix: str, _meta: object, _strict: bool, *_: object) -> None:
        for name in ("weight", "bias"):
            if (value := state.get(prefix + name)) is not None:
                setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if getattr(self.weight, "tensor_shape", None) is not None:
            destination[f"{prefix}temp.weight"] = torch.empty(self.weight.shape, device="meta")

    def _read(self, like: torch.Tensor) -> list[torch.Tensor | None]:
        found = []
        for weight in (self.weight, self.bias):
            shape = getattr(weight, "tensor_shape", None)
            if shape is not None:
                patches = weight.patches
                weight = out_of_blocks(weight, shape, like.dtype)
                if patches is not None:
                    weight = comfy.lora.calculate_weight(patches[0], weight, patches[1])
            found.append(None if weight is None else weight.to(like.device, like.dtype))
        return found


class GGMLOps(comfy.ops.manual_cast):
    class Linear(GGMLLayer, comfy.ops.manual_cast.Linear):
        def forward_comfy_cast_weights(self, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            return torch.nn.functional.linear(value, *self._read(value))

    class Conv2d(GGMLLayer, comfy.ops.manual_cast.Conv2d):
        def forward_comfy_cast_weights(self, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            return self._conv_forward(value, *self._read(value))


class GGUFModelPatcher(ModelPatcher):
    """A patcher that leaves the patching of packed weights to their layers."""

    def load(self, *args: object, **kwargs: object) -> None:
        super().load(*args, **{**kwargs, "force_patch_weights": True})

    def patch_weight_to_device(self, key: str, *args: object, **kwargs: object) -> None:
        weight = comfy.utils.get_attr(self.model, key)
        if getattr(weight, "tensor_shape", None) is None:
            super().patch_weight_to_device(key, *args, **kwargs)
        elif key in self.patches:
            weight.patches = (self.patches[key], key)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        for weight in self.model.parameters() if unpatch_weights else ():
            if getattr(weight, "patches", None) is not None:
                weight.patches = None
        super().unpatch_model(device_to, unpatch_weights)


class GGMLLayout(QuantizedLayout):
    """The same blocks as a layout of ComfyUI's quantised tensors, as newer loaders have them under dynamic VRAM."""

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        pass

    @classmethod
    def quantize(cls, *_args: object, **_kwargs: object) -> tuple:
        raise NotImplementedError

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Params) -> torch.Tensor:
        return out_of_blocks(qdata, torch.Size(params.orig_shape), params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor]:
        return (qtensor._qdata,)

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, _params: Params) -> dict[str, torch.Tensor]:
        return {"": qdata}


register_layout_class("GGMLLayout", GGMLLayout)


class Params4bit(torch.nn.Parameter):
    """Packed numbers as a parameter of a class of its own."""


class PackedOps(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        """A layer whose weight is packed once it is loaded."""

        def pack(self) -> None:
            self.whole = self.weight.shape
            self.weight = Params4bit(in_blocks(self.weight), requires_grad=False)

        def forward_comfy_cast_weights(self, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            if type(self.weight) is not Params4bit:
                return super().forward_comfy_cast_weights(value)
            bias = None if self.bias is None else self.bias.to(value.dtype)
            return torch.nn.functional.linear(value, out_of_blocks(self.weight, self.whole, value.dtype), bias)


class PlainlyPackedOps(PackedOps):
    class SVDQLinear(PackedOps.Linear):
        """The same with whole numbers in an ordinary parameter."""

        def pack(self) -> None:
            super().pack()
            self.weight = torch.nn.Parameter(self.weight.as_subclass(torch.Tensor), requires_grad=False)

        def forward_comfy_cast_weights(self, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            bias = None if self.bias is None else self.bias.to(value.dtype)
            return torch.nn.functional.linear(value, out_of_blocks(self.weight, self.whole, value.dtype), bias)

    Linear = SVDQLinear


def load(file: str, kind: str) -> ModelPatcher:
    """The model of a safetensors file as such a pack would have it."""
    state = comfy.utils.load_torch_file(file)
    if kind == "GGUF":
        state = {name: _as_gguf(weight) for name, weight in state.items()}
        model = comfy.sd.load_diffusion_model_state_dict(state, model_options={"custom_operations": GGMLOps})
        model.__class__ = GGUFModelPatcher
        return model
    if kind == "another patcher":
        model = comfy.sd.load_diffusion_model_state_dict(state)
        model.__class__ = GGUFModelPatcher
        return model
    if kind in ("GGUF, a layout", "GGUF, in ComfyUI's layers"):
        operations = comfy.ops.mixed_precision_ops({}, torch.float32)
        own = {"custom_operations": operations} if kind.endswith("layers") else {}
        model = comfy.sd.load_diffusion_model_state_dict(state, model_options=own)
        for layer in model.model.modules():
            if type(layer).__name__ == "Linear" and layer.weight.numel() % BLOCK == 0:
                params = GGMLLayout.Params(torch.ones(()), layer.weight.dtype, tuple(layer.weight.shape))
                packed = QuantizedTensor(in_blocks(layer.weight), "GGMLLayout", params)
                layer.weight = torch.nn.Parameter(packed, requires_grad=False)
                layer.quant_format, layer.layout_type, layer._full_precision_mm = "ggml", "GGMLLayout", True
        return model
    operations: Mapping[str, type] = {"NF4": PackedOps, "whole numbers": PlainlyPackedOps}
    model = comfy.sd.load_diffusion_model_state_dict(state, model_options={"custom_operations": operations[kind]})
    for layer in model.model.modules():
        if isinstance(layer, PackedOps.Linear) and layer.weight.numel() % BLOCK == 0:
            layer.pack()
    return model


def _as_gguf(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim < 2 or weight.numel() % BLOCK:
        return weight
    found = in_blocks(weight).as_subclass(GGMLTensor)
    found.tensor_shape = weight.shape
    return found
