// Titles of the groups and nodes of the pack's templates in Chinese, part by part, and where the notes name them.

/** @type {[RegExp, string][]} */
const PARTS = [
    [/^(\d) ControlNets$/, "$1 ControlNet"], [/^(\d) Models$/, "$1 模型"], [/^(\d) Model$/, "$1 模型"], [/^(\d) Model and LoRA$/, "$1 模型和 LoRA"], [/^(\d) Engines$/, "$1 引擎"], [/^(\d) Accelerate$/, "$1 加速"],
    [/^(\d) Sample$/, "$1 采样"], [/^(\d) Compare$/, "$1 比较"], [/^(\d) Two passes$/, "$1 两遍采样"], [/^(\d) Accelerated$/, "$1 已加速"], [/^(\d) On engines$/, "$1 已加速"],
    [/^(\d) (Without|Native)$/, "$1 未加速"], [/^(\d) Images and prompts$/, "$1 图像和提示词"], [/^(\d) Pictures? and prompt$/, "$1 图像和提示词"], [/^(\d) Prompt$/, "$1 提示词"],
    [/^(\d) Stream$/, "$1 流"], [/^(\d) Video and prompt$/, "$1 视频和提示词"], [/^Video$/, "视频"], [/^(\d) Depth and pose$/, "$1 深度和姿势"], [/^Depth$/, "深度"], [/^Pose$/, "姿势"], [/^Depth as an image$/, "深度图像"], [/^Pose as an image$/, "姿势图像"], [/^Load SDPose$/, "加载 SDPose"], [/^No picture yet$/, "还没有图像"],
    [/^(\d) ControlNet$/, "$1 ControlNet"], [/^No negative prompt$/, "没有负面提示词"], [/^Type of control$/, "控制类型"], [/^Picture to change$/, "要修改的图像"], [/^How pictures go in \(prompt\)$/, "图像如何进入（提示词）"], [/^How pictures go in \(negative prompt\)$/, "图像如何进入（负面提示词）"],
    [/^Load ControlNet\b/, "加载 ControlNet"], [/^Apply ControlNet\b/, "应用 ControlNet"], [/^Load LoRA$/, "加载 LoRA"], [/^Control image\b/, "控制图像"], [/^TRT ControlNet Engine\b/, "TRT ControlNet 引擎"],
    [/^What ran where$/, "运行情况"], [/^Second pass$/, "第二遍"], [/^First pass$/, "第一遍"], [/^Negative prompt$/, "负面提示词"], [/^Prompt$/, "提示词"], [/^Picture to repaint$/, "要重绘的图像"],
    [/^How to use this workflow$/, "使用说明"], [/^KSampler \((without|native)\)$/, "K采样器（未加速）"], [/^VAE Decode \((without|native)\)$/, "VAE解码（未加速）"], [/^KSampler \(accelerated\)$/, "K采样器（已加速）"],
    [/ \(edges\)$/, "（边缘）"], [/ \(depth\)$/, "（深度）"], [/ \(pose\)$/, "（姿势）"], [/ \(lines\)$/, "（线条）"],
];

const translated = (title) => PARTS.reduce((now, [part, words]) => now.replace(part, words), title);

/** A title in Chinese; of a note, which has several lines, the titles that it marks with asterisks. */
export function titlesInChinese(text) {
    if (!text.includes("\n")) return translated(text);
    return text.replace(/(\*{1,2})([^*\n]+)\1/g, (_, mark, title) => mark + translated(title) + mark);
}
