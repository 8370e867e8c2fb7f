// A build's log as people read it: without what ComfyUI says in every process that starts.

const NOISE = [
    /^Found comfy_kitchen backend /, /^Checkpoint files will /, /^Total VRAM /, /^pytorch version:/i, /^Set vram state to:/, /^Device: /,
    /^Using .*attention/, /^(xformers|triton) version:/i, /^Enabled? .*(fp16 accumulation|pinned memory)/i, /^Could not enable /,
    /^(Python|ComfyUI( frontend)?) version:/i, /^VAE dtype/, /^Using async weight offloading/, /^aimdo/i,
];

/** What a build wrote, and in the end why it failed, unless the log says that already. */
export function logLines(log, message = "") {
    const told = log.filter((line) => !NOISE.some((noise) => noise.test(line)));
    return !message || told.at(-1)?.includes(message) ? told : [...told, "", message];
}
