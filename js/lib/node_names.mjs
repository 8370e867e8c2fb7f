// Names of our nodes.

export const ACCELERATE = "TRTAccelerate";
export const CONTROLNET_ENGINE = "TRTControlNetEngine";
export const SAMPLER_PATCH = "TRTSamplerPatch";
export const APPLY_CONTROLNET = "TRTApplyControlNet";
export const STREAM = "TRTStream";
export const COMPARE = "TRTCompare";
export const REPORT = "TRTReport";
/** Kind of network -> the node for it alone. */
export const NODE_FOR = {
    unet: "TRTUNetEngine", controlnet: CONTROLNET_ENGINE, vae_decoder: "TRTVAEEngine", vae_encoder: "TRTVAEEngine",
};
export const ENGINE_NODES = [...new Set(Object.values(NODE_FOR)), ACCELERATE];
