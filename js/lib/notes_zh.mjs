// The notes and titles of the pack's templates in Chinese: notes by their first line, titles part by part.
// What notes name is written as it stands on the nodes.

const RUN = "点击 **运行**。第一次运行会构建缺少的引擎，需要几分钟；以后的运行会直接找到它们。";
const TOLD = "*TRT 报告* 说明加速了多少个模型，*What ran where* 显示每一次调用，*保存图像* 保存图片。";
const SIZES = (least, most) => `NVIDIA 显卡加速所有尺寸，其他设备加速 ${least} 到 ${most} 像素；需要更多时，在 *TRT 加速* 上选择尺寸。`;
const TWO = `两张图像决定新图片的形状：一张用边缘，一张用深度。

1. **1 Models**：选择您的 checkpoint 和 ControlNet。
2. **3 ControlNets**：在 *Control image 1 (edges)* 和 *Control image 2 (depth)* 中放入图像；各自的**强度**在 *TRT 应用 ControlNet* 上。
3. ${RUN}

${TOLD}`;
const MORE = (least, most) => `更多 ControlNet：*TRT 加速* 最多接受四个；再增大 *TRT 应用 ControlNet* 上的**行数**。${SIZES(least, most)}`;

const LCM = "LoRA 是 *latent-consistency/lcm-lora-sdv1-5* 的 *pytorch_lora_weights.safetensors*，以所示的文件名保存：有了它四步就够了。";

const CHOOSE = "选择您的模型、文本编码器和 VAE。";
const VAE_TOO = "*TRT 加速* 接受模型和 VAE，并输出加速后的两者。";
const LORAS = "所有 LoRA 都放在 *TRT 加速* 之前。使用 NVIDIA 显卡时，更换 LoRA 或改变 **strength_model** 不需要重新构建。";
const VIDEO = "*TRT 报告* 说明加速了多少个模型，*What ran where* 显示每一次调用，*保存视频* 保存视频。";
const VIDEO_SIZES = "使用 NVIDIA 显卡时，改变尺寸或 **length** 不需要重新构建。";
const WAN = `Wan 2.2 由两个模型组成：*First steps* 运行用于高噪声的模型，*Last steps* 运行另一个。两者都被加速，各有自己的 *TRT 加速*。有了这些 LoRA 四步就够了。不用时忽略（bypass）两者，使用 20 步（**steps**）、**cfg** 3.5，并在第 10 步更换模型。${VIDEO_SIZES}${VIDEO}`;

/** First line of an English note -> the whole note in Chinese. */
export const NOTES = {
    "# SD 1.5 with two ControlNets, accelerated": `# SD 1.5，两个 ControlNet，已加速\n\n${TWO}\n\n${MORE(256, 1024)}`,
    "# SDXL with two ControlNets, accelerated": `# SDXL，两个 ControlNet，已加速\n\n${TWO}

这两个 ControlNet 是 *diffusers/controlnet-canny-sdxl-1.0* 和 *diffusers/controlnet-depth-sdxl-1.0* 的 *diffusion_pytorch_model.fp16.safetensors*，以所示的文件名保存。\n\n${MORE(512, 1536)}`,
    "# Repaint with a ControlNet, accelerated": `# 用 ControlNet 重画，已加速

重画一张图片，由 ControlNet 保持形状，因此可以改变很多。

1. **1 Models**：选择您的 checkpoint 和 ControlNet。
2. **3 Pictures and prompt**：放入 *Picture to repaint* 和 *Control image 1 (edges)*，例如它的边缘图。
3. ${RUN}

*K采样器* 上的**降噪**决定改变多少，*TRT 应用 ControlNet* 上的**强度**决定形状保持得多严格。${SIZES(256, 1024)}`,
    "# With and without, side by side": `# 有无加速对比

同一张图片生成两次：**4 Without** 只用 ComfyUI，**5 Accelerated** 使用 *TRT 加速*。*保存图像* 把两张图并排保存（左边未加速），*TRT 比较* 说明相差多少并显示差异（黑色：没有差异），*What ran where* 显示每一次调用。

1. **1 Models**：${CHOOSE}
2. **3 Prompt**：写出图片显示什么。
3. 点击 **运行** 两次，比较 ComfyUI 在两个采样器上显示的时间。第一次运行还要构建引擎。

半精度在引擎中的舍入方式不同，因此有微弱差异是正常的。`,
    "# Advanced: a node for each engine": `# 高级：每个引擎一个节点

同样是两个 ControlNet，但每个引擎有一个节点，因此各有自己的设置：尺寸、精度、后端。

1. **1 Models**：选择您的 checkpoint 和 ControlNet。
2. **2 Engines**：选择设置。*TRT UNet 引擎* 查找或构建引擎，*TRT 采样器补丁* 让模型在引擎上运行。*TRT ControlNet Engine 1* 和 *2* 输出在引擎上运行的 ControlNet。
3. ${RUN}

*TRT 加速* 用一个节点完成这一切；由这些节点组成的工作流仍可运行。`,
    "# Webcam to picture, accelerated": `# 摄像头到图片，已加速

摄像头看到的画面每秒多次变成图片，ControlNet 保持其边缘。

1. **1 Models**：选择您的 checkpoint、LCM LoRA 和用于边缘的 ControlNet。
2. 在侧边栏打开“TRT 实时”面板，点击“用摄像头开始”。第一次运行会构建缺少的引擎，需要几分钟。
3. 运行时可在那里更改强度、降噪、种子和提示词。“停止”之后，*保存图像* 保存最后一张图片。

*TRT 流* 的“帧”没有连接，因此接收实时画面。ControlNet 的图像由每一帧生成，所以 *No picture yet* 不会出现。需要更快时使用 1 到 2 步，或加载 VAE taesd。

${LCM}`,
    "# Webcam with depth and pose, accelerated": `# 摄像头画面的深度和姿势，已加速

摄像头看到的画面变成图片。一个 ControlNet 保持其深度，另一个保持人物的姿势。

1. **1 Models**：选择您的 checkpoint、LCM LoRA 以及用于深度和姿势的 ControlNet。*Load Depth Anything 3* 和 *Load SDPose* 加载寻找深度和姿势的模型。
2. 在侧边栏打开“TRT 实时”面板，点击“用摄像头开始”。第一次运行会构建缺少的引擎，需要几分钟。
3. 运行时可在那里更改各个强度、降噪、种子和提示词。

*TRT 帧* 代表该帧：它与 *TRT 应用 ControlNet* 之间的所有节点对每一帧重新运行。那里可以放任何其他节点，例如您自己的节点包中的节点。*Depth* 和 *Pose* 是可选的：不需要的可以忽略（bypass）。

每一帧都要等待这些模型；*TRT 报告* 显示所用的时间。SDPose 是一个大模型。

${LCM}`,
    "# Video to video, accelerated": `# 视频到视频，已加速

按照提示词重画视频的每一帧，ControlNet 保持其边缘。

1. **1 Models**：选择您的 checkpoint、LCM LoRA 和用于边缘的 ControlNet。
2. **3 Video and prompt**：放入 *Video*，并写出它应该变成什么。
3. ${RUN}

*TRT 流* 一次采样所有帧。**降噪**决定改变多少；每帧使用相同的种子使图像保持稳定。*保存视频* 保存结果和声音。

${LCM}`,
    "# Flux.1, accelerated": `# Flux.1，已加速

由提示词生成图片，与不使用本节点包时相同，只是更快。

1. **1 Models**：选择您的模型、文本编码器和 VAE。
2. ${RUN}

${VAE_TOO}**引导**决定图片多么贴近提示词；改变它不需要重新构建。${TOLD}`,
    "# Flux.1 with a ControlNet, accelerated": `# Flux.1，一个 ControlNet，已加速

一张图像用边缘决定新图片的形状。ControlNet 与模型一起被加速。

1. **1 Models**：选择您的模型。ControlNet 是 *Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro-2.0* 的 *diffusion_pytorch_model.safetensors*，以所示的文件名保存。
2. **3 ControlNet**：放入 *Control image 1 (edges)*；它的**强度**、**起点**和**终点**在 *TRT 应用 ControlNet* 上。
3. ${RUN}

*Type of control* 说明图像显示的是什么。Union Pro 2 自己能看出来；Union 和 Union Pro 需要它。InstantX 的 ControlNet 也可以放在这里。`,
    "# Z-Image, accelerated": `# Z-Image，已加速

由提示词生成图片，与不使用本节点包时相同，只是更快。

1. **1 Models**：${CHOOSE}
2. ${RUN}

${VAE_TOO}提示词只为所有步数编码一次。LoRA 放在 *TRT 加速* 之前。${TOLD}`,
    "# Krea 2, accelerated": `# Krea 2，已加速

由任意长度的提示词生成图片，与不使用本节点包时相同，只是更快。

1. **1 Models**：${CHOOSE}
2. ${RUN}

${VAE_TOO}LoRA 放在 *TRT 加速* 之前。${TOLD}`,
    "# Qwen-Image, accelerated": `# Qwen-Image，已加速

由任意长度的提示词生成图片，与不使用本节点包时相同，只是更快。

1. **1 Models**：${CHOOSE}
2. ${RUN}

${VAE_TOO}InstantX 的 ControlNet 也可以经过 *TRT 加速*。${TOLD}`,
    "# Qwen-Image-Edit, accelerated": `# Qwen-Image-Edit，已加速

按照提示词修改一张图片，其余部分保持不变。

1. **1 Models**：${CHOOSE}
2. **3 Pictures and prompt**：放入 *Picture 1 to change*，并在 *Prompt* 中写出要改变什么。
3. ${RUN}

提示词称其他图像为 image 2 和 image 3。需要的图像较少时，忽略（bypass）*Picture 2* 或 *Picture 3*；图像数量改变不需要重新构建。${VAE_TOO}${TOLD}`,
    "# Z-Image with a LoRA in fp8, accelerated": `# Z-Image，fp8 和 LoRA，已加速

LoRA 改变图片的风格，带 LoRA 的模型会被加速。

1. **1 Models**：选择您的模型、LoRA、文本编码器和 VAE。
2. ${RUN}

**weight_dtype** 使模型占用的显存减半；选择 *default* 使用完整精度。${LORAS}${TOLD}`,
    "# Krea 2 with a LoRA, accelerated": `# Krea 2，LoRA，已加速

LoRA 改变图片的风格，带 LoRA 的模型会被加速。

1. **1 Models**：选择您的模型、LoRA、文本编码器和 VAE。
2. ${RUN}

这个 LoRA 需要这些词：muted minimalist sketch style。${LORAS}${TOLD}`,
    "# Z-Image with Fun control, accelerated": `# Z-Image，Fun control，已加速

一张图像决定新图片的形状：用边缘、深度、姿势或线条。

1. **1 Models**：选择您的模型、文本编码器、VAE 和 Fun control。
2. **3 Prompt and picture**：放入 *Control image 1 (edges)*。
3. ${RUN}

*Fun control* 在 *TRT 加速* 之前：一个引擎计算两者。它的**强度**和图像可以改变，不需要重新构建。${TOLD}`,
    "# Flux.2 klein, accelerated": `# Flux.2 klein，已加速

按照提示词修改一张图片，只需四步。

1. **1 Models**：${CHOOSE}
2. **3 Picture and prompt**：放入 *Picture to change*，并在 *Prompt* 中写出要改变什么。
3. ${RUN}

需要第二张图像时，复制 *The picture goes in* 和 *VAE Encode*，接在第一张之后。${VAE_TOO}${TOLD}`,
    "# Flux.1 Kontext, accelerated": `# Flux.1 Kontext，已加速

按照提示词修改一张图片，其余部分保持不变。

1. **1 Models**：选择您的模型、文本编码器和 VAE。
2. **3 Picture and prompt**：放入 *Picture to change*，并在 *Prompt* 中写出要改变什么。
3. ${RUN}

**引导**决定图片多么贴近提示词。${VAE_TOO}${TOLD}`,
    "# Flux.1 Fill, accelerated": `# Flux.1 Fill，已加速

重画图片中被遮罩的部分，其余部分保持不变。

1. **1 Models**：选择您的模型、文本编码器和 VAE。
2. **3 Picture and prompt**：放入 *Picture with a mask*。右键点击它，打开遮罩编辑器绘制遮罩。在 *Prompt* 中写出那里应该有什么。
3. ${RUN}

改变遮罩、图片或**引导**不需要重新构建。${VAE_TOO}${TOLD}`,
    "# Wan 2.2, text to video, accelerated": `# Wan 2.2，文生视频，已加速

由提示词生成视频，与不使用本节点包时相同，只是更快。

1. **1 Models**：选择您的两个模型、它们的 LoRA、文本编码器和 VAE。
2. ${RUN}

${WAN}`,
    "# Wan 2.2, image to video, accelerated": `# Wan 2.2，图生视频，已加速

按照提示词由一张图片生成视频，与不使用本节点包时相同，只是更快。

1. **1 Models**：选择您的两个模型、它们的 LoRA、文本编码器和 VAE。
2. **3 Picture and prompt**：放入 *Picture to begin with*。
3. ${RUN}

${WAN}`,
    "# MiniMax H3, text to video, accelerated": `# MiniMax H3，文生视频，已加速

由提示词生成有声视频，与不使用本节点包时相同，只是更快。

1. **1 Models**：${CHOOSE}
2. **3 Prompt**：写出看到和听到的内容。
3. ${RUN}

把图片接到 *Prompt and size* 的 **first_frame** 或 **last_frame**，视频就以它开始或结束。${VAE_TOO}声音的 VAE 以正常速度运行。${VIDEO_SIZES}${VIDEO}`,
    "# LTX-2.3, text to video, accelerated": `# LTX-2.3，文生视频，已加速

由提示词生成有声视频，与不使用本节点包时相同，只是更快。

1. **1 Models**：在三个加载器中选择您的 checkpoint，以及文本编码器。
2. **3 Prompt**：写出看到和听到的内容。
3. ${RUN}

需要其他长度时，同样改变 *Size of the video* 上的 **length** 和 *Length of the sound* 上的 **frames_number**。${VAE_TOO}声音的 VAE 以正常速度运行。${VIDEO_SIZES}${VIDEO}`,
};

/** A template's note in Chinese, or as it is. */
export function inChinese(note) {
    return NOTES[String(note).split("\n", 1)[0]] ?? note;
}

/** @type {[RegExp, string][]} */
const PARTS = [
    [/^(\d) ControlNets$/, "$1 ControlNet"], [/^(\d) Models$/, "$1 模型"], [/^(\d) Engines$/, "$1 引擎"], [/^(\d) Accelerate$/, "$1 加速"],
    [/^(\d) Sample$/, "$1 采样"], [/^(\d) Compare$/, "$1 比较"], [/^(\d) Accelerated$/, "$1 已加速"], [/^(\d) On engines$/, "$1 已加速"],
    [/^(\d) (Without|Native)$/, "$1 未加速"], [/^(\d) Images and prompts$/, "$1 图像和提示词"], [/^(\d) Pictures? and prompt$/, "$1 图像和提示词"], [/^(\d) Prompt$/, "$1 提示词"],
    [/^(\d) Stream$/, "$1 流"], [/^(\d) Video and prompt$/, "$1 视频和提示词"], [/^Video$/, "视频"], [/^(\d) Depth and pose$/, "$1 深度和姿势"], [/^Depth$/, "深度"], [/^Pose$/, "姿势"], [/^Depth as an image$/, "深度图像"], [/^Pose as an image$/, "姿势图像"], [/^Load SDPose$/, "加载 SDPose"], [/^No picture yet$/, "还没有图像"],
    [/^(\d) ControlNet$/, "$1 ControlNet"], [/^No negative prompt$/, "没有负面提示词"], [/^Type of control$/, "控制类型"], [/^Picture to change$/, "要修改的图像"], [/^Picture 1 to change$/, "图像 1（要修改）"], [/^Picture (2|3)$/, "图像 $1"], [/^Picture with a mask$/, "带遮罩的图像"], [/^Picture to begin with$/, "开始的图像"], [/^The picture goes in$/, "图像进入"],
    [/^(\d) Prompt and picture$/, "$1 提示词和图像"], [/^First steps$/, "前几步"], [/^Last steps$/, "后几步"], [/^Model for high noise$/, "高噪声模型"], [/^Model for low noise$/, "低噪声模型"], [/^LoRA for high noise$/, "高噪声 LoRA"], [/^LoRA for low noise$/, "低噪声 LoRA"],
    [/^Shift for high noise$/, "高噪声偏移"], [/^Shift for low noise$/, "低噪声偏移"], [/^TRT Accelerate \(high noise\)$/, "TRT 加速（高噪声）"], [/^TRT Accelerate \(low noise\)$/, "TRT 加速（低噪声）"], [/^Size of the video$/, "视频尺寸"], [/^Length of the sound$/, "声音长度"], [/^Frames per second$/, "每秒帧数"],
    [/^Load the sound's VAE$/, "加载声音的 VAE"], [/^Prompt and size$/, "提示词和尺寸"], [/^How pictures go in \(prompt\)$/, "图像如何进入（提示词）"], [/^How pictures go in \(negative\)$/, "图像如何进入（负面提示词）"],
    [/^Load ControlNet\b/, "加载 ControlNet"], [/^Apply ControlNet\b/, "应用 ControlNet"], [/^Load LoRA$/, "加载 LoRA"], [/^Control image\b/, "控制图像"], [/^TRT ControlNet Engine\b/, "TRT ControlNet 引擎"],
    [/^What ran where$/, "运行情况"], [/^Negative prompt$/, "负面提示词"], [/^Prompt$/, "提示词"], [/^Picture to repaint$/, "要重绘的图像"],
    [/^How to use this workflow$/, "使用说明"], [/^KSampler \((without|native)\)$/, "K采样器（未加速）"], [/^VAE Decode \((without|native)\)$/, "VAE解码（未加速）"], [/^KSampler \(accelerated\)$/, "K采样器（已加速）"],
    [/ \(edges\)$/, "（边缘）"], [/ \(depth\)$/, "（深度）"], [/ \(pose\)$/, "（姿势）"],
];

const translated = (title) => PARTS.reduce((now, [part, words]) => now.replace(part, words), title);

/** A title in Chinese; of a note, which has several lines, the titles that it marks with asterisks. */
export function titlesInChinese(text) {
    if (!text.includes("\n")) return translated(text);
    return text.replace(/(\*{1,2})([^*\n]+)\1/g, (_, mark, title) => mark + translated(title) + mark);
}
