"""Prompts of the workflows that ``random_families`` draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from random_families import CHANNELS_16, FAMILIES, RELAYS, Workflow
from random_workflows import ModelNode
from scenarios import CONDITIONING, SETTINGS, Link, Prompt, node


@dataclass
class _Graph:
    """A prompt in the making."""

    w: Workflow
    engines: bool
    prompt: Prompt = field(default_factory=dict)

    def add(self, name: str, kind: str, /, **inputs: Any) -> Link:
        """Put a node into the prompt; return its first output."""
        self.prompt[name] = node(kind, **inputs)
        return [name, 0]

    @property
    def settings(self) -> dict[str, Any]:
        w = self.w
        changed = any(kind == "LoraLoaderModelOnly" or kind.startswith("ModelMerge") for kind, *_ in w.before)
        backend = "torch" if "fp8" in w.unet else w.backend  # compiling, which another one would mean, takes minutes
        missing = "build now" if backend == "onnxruntime" and not changed else "use native"
        return {**SETTINGS, "backend": backend, "when_missing": missing, "weights": w.weights}

    # models

    def loaded(self, name: str, file: str, family: str) -> Link:
        return self.add(name, FAMILIES[family].loader, unet_name=f"{file}.safetensors", weight_dtype="default")

    def through(self, nodes: tuple[ModelNode, ...], model: Link, name: str) -> Link:
        for number, (kind, models, inputs) in enumerate(nodes):
            own = {key: list(value) if isinstance(value, tuple) else value for key, value in inputs}
            own |= dict(zip(models, [model, ["other", 0]], strict=False))
            model = self.add(f"{name}_{number}", kind, **own)
        return model

    def patched(self, model: Link, behind: bool) -> Link:
        for number, one in enumerate(self.w.patches):
            if one.behind is not behind:
                continue
            image, name = self.image(one.image), f"network_{number}"
            if one.kind.startswith("fun"):
                version = "1" if one.kind == "fun 1" else "2.1"
                patch = self.add(f"load_{one.kind}", "TestFunPatch", version=version, other=one.kind == "fun other")
                more = {}
                if one.kind.endswith("inpaint"):
                    more = {"inpaint_image": self.image(2), "mask": self.mask()}
                model = self.add(name, "ZImageFunControlnet", model=model, model_patch=patch, vae=self.vae(),
                                 strength=one.strength, image=image, **more)  # fmt: skip
            else:
                patch = self.add(f"load_{one.kind}", "ModelPatchLoader", name=f"{one.kind}.safetensors")
                more = {"mask": self.mask()} if one.kind.endswith("inpaint") else {}
                model = self.add(name, "AnimaLLLiteApply", model=model, model_patch=patch, image=image,
                                 strength=one.strength, start_percent=one.start, end_percent=one.end,
                                 **more)  # fmt: skip
        return model

    def on_engine(self, model: Link, name: str) -> Link:
        way = self.w.way if self.engines else "none"
        if way == "patch":
            engine = self.add(f"{name}_engine", "TRTUNetEngine", model=model, **self.settings)
            return self.add(f"{name}_patch", "TRTSamplerPatch", model=model, engine=engine)
        if way == "accelerate":
            return self.add(f"{name}_accelerate", "TRTAccelerate", model=model, **self.settings)
        return model

    # pictures

    def image(self, seed: int, size: tuple[int, int] | None = None, batch: int = 1) -> Link:
        width, height = size or self.w.size[:2]
        return self.add(f"image_{seed}_{width}_{height}_{batch}", "TestImage", seed=seed, width=width, height=height,
                        batch=batch, channels=3)  # fmt: skip

    def mask(self) -> Link:
        return self.add("mask", "SolidMask", value=0.6, width=self.w.size[0], height=self.w.size[1])

    def vae(self) -> Link:
        vae = self.add("vae", "VAELoader", vae_name=f"{FAMILIES[self.w.family].vae}.safetensors")
        if self.engines and self.w.vae_engine:
            names = ("when_missing", "min_size", "opt_size", "max_size", "backend")
            own = {name: SETTINGS[name] for name in names}
            return self.add("vae_engine", "TRTVAEEngine", vae=vae, **own)
        return vae

    def latent(self) -> Link:
        width, height, batch = self.w.size
        if self.w.family == "ltx2":
            return self.add("latent", "TestVideoWithSound", width=width, height=height, length=self.w.length,
                            batch=batch)  # fmt: skip
        if self.w.family == "minimax_h3":
            return self.add("latent", "EmptyMiniMaxH3LatentAV", width=width, height=height,
                            length=5 + 17 * (self.w.length > 5))  # fmt: skip
        wide = self.w.unet == "tiny_wan22_5b" or self.w.family in ("hunyuan", "qwen_image21")  # none has a tiny VAE
        relayed = self.w.style == "relay" and not self.flat  # the first model knows no pictures in a row
        if self.w.picture and not wide and not relayed and not self.w.length > 1:
            encoded = self.add("encoded", "VAEEncode", pixels=self.image(7), vae=self.vae())
            return self.add("repeated", "RepeatLatentBatch", samples=encoded, amount=batch) if batch > 1 else encoded
        if self.w.length:
            return self.add("latent", "EmptyHunyuanLatentVideo", width=width, height=height, length=self.w.length,
                            batch_size=batch)  # fmt: skip
        kind = "EmptyFlux2LatentImage" if self.w.family == "flux2" else "EmptySD3LatentImage"
        if self.w.family == "qwen_image21" or kind == "EmptySD3LatentImage" and (width % 16 or height % 16):
            kind = "EmptyLatentImage"
        return self.add("latent", kind, width=width, height=height, batch_size=batch)

    # conditionings

    def words(self, name: str, tokens: int, seed: int, family: str | None = None) -> Link:
        key = FAMILIES[family or self.w.family].words
        return self.add(name, "TestConditioning", tokens=tokens, seed=seed, **CONDITIONING[key])

    def composed(self, how: str, name: str, one: Link, part: Link) -> Link:
        width, height, _ = self.w.size

        def add(kind: str, /, **inputs: Any) -> Link:
            return self.add(f"{name}_{len(self.prompt)}", kind, **inputs)

        if how == "zeroed":
            return add("ConditioningZeroOut", conditioning=one)
        if how == "multiply":
            return add("ConditioningMultiply", conditioning=one, multiplier=0.7)
        if how == "hook" and "fp8" not in self.w.unet:
            hook = add("CreateHookLoraModelOnly", lora_name=f"{FAMILIES[self.w.family].lora}.safetensors",
                       strength_model=0.9)  # fmt: skip
            return add("ConditioningSetProperties", cond_NEW=one, strength=1.0, set_cond_area="default", hooks=hook)
        if how == "concat":
            return add("ConditioningConcat", conditioning_to=one, conditioning_from=part)
        if how == "average":
            return add("ConditioningAverage", conditioning_to=one, conditioning_from=part, conditioning_to_strength=0.4)
        if how == "area":
            part = add("ConditioningSetArea", conditioning=part, width=64, height=64, x=0, y=0, strength=0.8)
        elif how == "mask":
            part = add("ConditioningSetMask", conditioning=part, mask=self.mask(), strength=0.7,
                       set_cond_area="default")  # fmt: skip
        elif how == "range":
            part = add("ConditioningSetTimestepRange", conditioning=part, start=0.0, end=0.5)
            one = add("ConditioningSetTimestepRange", conditioning=one, start=0.5, end=1.0)
        elif how == "default":
            mask = add("SolidMask", value=1.0, width=width // 2, height=height)
            one = add("ConditioningSetMask", conditioning=one, mask=mask, strength=1.0,
                      set_cond_area="mask bounds" if self.flat else "default")  # fmt: skip
            return add("ConditioningSetDefaultCombine", cond=one, cond_DEFAULT=part)
        elif how != "three":
            return one
        both = add("ConditioningCombine", conditioning_1=one, conditioning_2=part)
        if how != "three":
            return both
        return add("ConditioningCombine", conditioning_1=both, conditioning_2=self.words(f"{name}_third", 20, 9))

    @property
    def flat(self) -> bool:
        """Tell whether the family's latents are single pictures; others have a row of them."""
        return self.w.family in ("flux1", "flux2", "zimage")

    @property
    def reads_slowly(self) -> bool:
        """Tell whether the family's VAE has ComfyUI's full encoder, or no tiny one."""
        return self.w.family == "qwen_image21" or FAMILIES[self.w.family].vae.endswith("kl") and not self.w.vae_engine

    def referring(self, one: Link, name: str) -> Link:
        w, f = self.w, FAMILIES[self.w.family]
        for number, size in enumerate(w.references):
            if self.reads_slowly:
                encoded = self.add(f"reference_{number}", "TestLatent", seed=20 + number, width=size[0] // f.step,
                                   height=size[1] // f.step,
                                   channels={"flux2": 128, "qwen_image21": 64}.get(w.family, 16))
            else:
                encoded = self.add(f"reference_{number}", "VAEEncode", pixels=self.image(20 + number, size),
                                   vae=self.vae())  # fmt: skip
            one = self.add(f"{name}_{number}", "ReferenceLatent", conditioning=one, latent=encoded)
        if w.method and w.references:
            one = self.add(f"{name}_method", "FluxKontextMultiReferenceLatentMethod", conditioning=one,
                           reference_latents_method=w.method)  # fmt: skip
        return one

    def guided(self, one: Link, name: str) -> Link:
        if self.w.guidance is None:
            return one
        if self.w.guidance < 0:
            return self.add(f"{name}_unguided", "FluxDisableGuidance", conditioning=one)
        return self.add(f"{name}_guided", "FluxGuidance", conditioning=one, guidance=self.w.guidance)

    def conditionings(self) -> tuple[Link, Link]:
        w = self.w
        positive, negative, part = (self.words(name, tokens, seed) for name, tokens, seed in zip(
            ("positive", "negative", "part"), w.tokens, (1, 2, 3), strict=True))  # fmt: skip
        if w.words:
            positive = self.add("words", "TestPromptMask", conditioning=positive, words=w.words)
        positive = self.composed(w.conditioning, "pos", positive, part)
        negative = self.composed(w.negative, "neg", negative, part)
        positive = self.guided(self.referring(positive, "pos_ref"), "pos")
        if w.negative_references:
            negative = self.referring(negative, "neg_ref")
        return positive, negative

    def videos(self, positive: Link, negative: Link, latent: Link) -> tuple[Link, Link, Link]:
        """Add to prompts as Wan's nodes do."""
        w = self.w
        width, height, batch = w.size
        common = {"vae": self.vae(), "width": width, "height": height, "length": w.length, "batch_size": batch}
        clip = lambda seed: self.add(f"seen_{seed}", "TestSeen", seed=seed)  # noqa: E731
        if w.unet in ("tiny_wan_i2v", "tiny_wan22_i2v") and w.video:
            more = {"clip_vision_output": clip(1)} if w.unet == "tiny_wan_i2v" else {}
            more |= {"start_image": self.image(8, batch=min(5, w.length))} if w.video[0] else {}
            self.add("begun", "WanImageToVideo", positive=positive, negative=negative, **common, **more)
        elif w.unet == "tiny_wan_flf2v" and w.video:
            more = {"clip_vision_start_image": clip(1), "start_image": self.image(8)} if w.video[0] else {}
            more |= {"clip_vision_end_image": clip(2), "end_image": self.image(9)} if len(w.video) > 1 else {}
            self.add("begun", "WanFirstLastFrameToVideo", positive=positive, negative=negative, **common, **more)
        elif w.unet == "tiny_wan_vace":
            for number, strength in enumerate(w.video):
                more = {"control_video": self.image(10 + number, batch=w.length)}
                more |= {"control_masks": self.mask()} if strength == 0.5 else {}
                more |= {"reference_image": self.image(12)} if w.picture else {}
                name = f"vace_{number}"
                self.add(name, "WanVaceToVideo", positive=positive, negative=negative, **common, strength=strength,
                         **more)  # fmt: skip
                positive, negative, latent = [name, 0], [name, 1], [name, 2]
            return positive, negative, latent
        elif w.unet == "tiny_wan" and len(w.video) > 1:
            self.add("begun", "WanPhantomSubjectToVideo", positive=positive, negative=negative, **common,
                     images=self.image(8, batch=2))  # fmt: skip
            return ["begun", 0], ["begun", 1 if w.video[0] else 2], ["begun", 3]
        else:
            return positive, negative, latent
        return ["begun", 0], ["begun", 1], ["begun", 2]

    def controlled(self, positive: Link, negative: Link) -> tuple[Link, Link]:
        w, f = self.w, FAMILIES[self.w.family]
        rows: dict[str, Any] = {}
        for i, n in enumerate(w.nets, start=1):
            net = self.add(f"load_{n.file}", f.net_loader, control_net_name=f"{n.file}.safetensors")
            on_engine = self.engines and n.engine
            if on_engine:
                net = self.add(f"engine_{i}", "TRTControlNetEngine", control_net=net, **self.settings)
            if n.file.endswith("union") and n.type:
                net = self.add(f"type_{i}", "SetUnionControlNetType", control_net=net, type=n.type)
            image = self.image(n.image)
            if self.engines and w.stack:
                rows |= {f"rows.control_net_{i}": net, f"rows.image_{i}": image, f"rows.strength_{i}": n.strength,
                         f"rows.start_{i}": n.start, f"rows.end_{i}": n.end}  # fmt: skip
                continue
            self.add(f"apply_{i}", "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net,
                     image=image, strength=n.strength, start_percent=n.start, end_percent=n.end,
                     vae=self.vae())  # fmt: skip
            positive, negative = [f"apply_{i}", 0], [f"apply_{i}", 1]
        if rows:
            self.add("apply", "TRTApplyControlNet", positive=positive, negative=negative, vae=self.vae(),
                     rows=str(len(w.nets)), **rows)  # fmt: skip
            return ["apply", 0], ["apply", 1]
        return positive, negative

    # sampling

    def sampled(self, model: Link, positive: Link, negative: Link, latent: Link) -> Link:
        w, half = self.w, max(1, self.w.steps // 2)
        common = {"model": model, "positive": positive, "negative": negative, "steps": w.steps, "cfg": w.cfg,
                  "sampler_name": w.sampler, "scheduler": w.scheduler}  # fmt: skip
        if w.style == "two stages":
            first = self.add("first", "KSamplerAdvanced", **common, noise_seed=w.seed, add_noise="enable",
                             latent_image=latent, start_at_step=0, end_at_step=half,
                             return_with_leftover_noise="enable")  # fmt: skip
            return self.add("sampler", "KSamplerAdvanced", **common | {"model": self.second(model)}, noise_seed=w.seed,
                            add_noise="disable", latent_image=first, start_at_step=half, end_at_step=10000,
                            return_with_leftover_noise="disable")  # fmt: skip
        if w.style == "twice":
            first = self.add("first", "KSampler", **common, seed=w.seed, latent_image=latent, denoise=w.denoise)
            larger = self.add("larger", "LatentUpscaleBy", samples=first, upscale_method="nearest-exact", scale_by=1.5)
            return self.add("sampler", "KSampler", **common, seed=w.seed, latent_image=larger, denoise=0.5)
        if w.style in ("custom", "basic", "dual", "perp", "two models"):
            given = {"noise": self.add("noise", "RandomNoise", noise_seed=w.seed),
                     "sampler": self.add("select", "KSamplerSelect", sampler_name=w.sampler),
                     "sigmas": self.add("sigmas", "BasicScheduler", model=model, scheduler=w.scheduler, steps=w.steps,
                                        denoise=w.denoise), "latent_image": latent}  # fmt: skip
            return self.add("sampler", "SamplerCustomAdvanced", **given, guider=self.guider(model, positive, negative))
        if w.style == "noise mask":
            half_mask = self.add("where", "SolidMask", value=0.5, width=w.size[0], height=w.size[1])
            latent = self.add("masked", "SetLatentNoiseMask", samples=latent, mask=half_mask)
        return self.add("sampler", "KSampler", **common, seed=w.seed, latent_image=latent, denoise=w.denoise)

    def guider(self, model: Link, positive: Link, negative: Link) -> Link:
        cfg, style = self.w.cfg, self.w.style
        if style == "basic":
            return self.add("guider", "BasicGuider", model=model, conditioning=positive)
        if style == "dual":
            return self.add("guider", "DualCFGGuider", model=model, cond1=positive, cond2=["part", 0],
                            negative=negative, cfg_conds=cfg, cfg_cond2_negative=2.0, style="regular")  # fmt: skip
        if style == "perp":
            return self.add("guider", "PerpNegGuider", model=model, positive=positive, negative=negative,
                            empty_conditioning=["part", 0], cfg=cfg, neg_scale=0.8)  # fmt: skip
        if style == "two models":
            return self.add("guider", "DualModelGuider", model=model, positive=positive, cfg=cfg,
                            model_negative=self.second(model), negative=negative)  # fmt: skip
        return self.add("guider", "CFGGuider", model=model, positive=positive, negative=negative, cfg=cfg)

    def second(self, model: Link) -> Link:
        """Another model for the rest of the steps, or the same."""
        return self.on_engine(["other", 0], "second") if self.w.seed % 3 == 0 else model

    def begun(self, latent: Link) -> Link:
        """A latent that another family's model has begun."""
        w = self.w
        if w.style != "relay" or w.family not in CHANNELS_16:
            return latent
        family = RELAYS[w.relay]
        model = self.on_engine(self.loaded("relay_model", w.relay, family), "relay")
        words = [self.words(f"relay_{seed}", w.tokens[0], seed, family) for seed in (4, 5)]
        return self.add("relay", "KSampler", model=model, positive=words[0], negative=words[1], latent_image=latent,
                        seed=w.seed, steps=2, cfg=w.cfg, sampler_name="euler", scheduler="simple", denoise=1.0)


def prompt_of(w: Workflow, engines: bool, name: str) -> Prompt:
    """The workflow as a prompt that saves its latent under ``name``."""
    graph, f = _Graph(w, engines), FAMILIES[w.family]
    files = [one for one in f.files if one != w.unet and "fp8" not in one]  # ComfyUI merges no quantised weights
    other = files[0] if files else w.unet
    graph.loaded("other", other, w.family)
    graph.add("operation", "LatentOperationTonemapReinhard", multiplier=0.5)
    model = graph.through(w.before, graph.loaded("unet", w.unet, w.family), "before")
    model = graph.on_engine(graph.patched(model, behind=False), "unet")
    model = graph.through(w.after, graph.patched(model, behind=True), "after")
    positive, negative = graph.conditionings()
    latent = graph.latent()
    if w.length:
        positive, negative, latent = graph.videos(positive, negative, latent)
    positive, negative = graph.controlled(positive, negative)
    sampled = graph.sampled(model, positive, negative, graph.begun(latent))
    graph.add("save", "TestSaveLatent", latent=sampled, name=name)
    if engines:
        graph.add("report", "TRTReport", after=sampled)
    return graph.prompt
