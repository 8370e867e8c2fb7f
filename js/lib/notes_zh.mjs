// The notes of the pack's templates in Chinese, by their first line; what they name is written as it stands on the nodes.

const TWO = `1. **1 Models**：选择您的 checkpoint 和 ControlNet。
2. **3 ControlNets**：在 *Control image 1 (edges)* 和 *Control image 2 (depth)* 中放入图像；各自的**强度**在 *TRT 应用 ControlNet* 上。
3. 点击 **运行**。第一次运行会构建 **2 Engines** 中的三个引擎，需要几分钟；以后的运行会直接找到它们。

*TRT 报告* 的第一行说明有多少个网络在引擎上运行，*What ran where* 显示每一次调用，图片会被保存。`;
const MORE = (least, most) => `*更多 ControlNet*：增大 *TRT 应用 ControlNet* 上的**行数**。*其他图片尺寸*：引擎接受 ${least} 到 ${most} 像素、一次一张图片；需要其他尺寸时，在引擎节点上选择**尺寸**。`;

/** First line of an English note -> the whole note in Chinese. */
export const NOTES = {
    "# Text to image, accelerated": `# 文生图，已加速

1. **1 Model**：选择您的 checkpoint。
2. 点击 **运行**。第一次运行会构建引擎，需要几分钟；以后的运行会直接找到它。

除了您熟悉的节点，只需要一个 *TRT Accelerate*：模型经过它再到 *KSampler*。ControlNet 也可以经过它。*TRT Report* 说明运行情况，*What ran where* 显示每一次调用，*Save Image* 保存图片。`,
    "# SD 1.5 with two ControlNets on engines": `# SD 1.5，两个 ControlNet 在引擎上运行\n\n${TWO}\n\n${MORE(256, 1024)}`,
    "# SDXL with two ControlNets on engines": `# SDXL，两个 ControlNet 在引擎上运行\n\n${TWO}

这两个 ControlNet 是 *diffusers/controlnet-canny-sdxl-1.0* 和 *diffusers/controlnet-depth-sdxl-1.0* 的 *diffusion_pytorch_model.fp16.safetensors*，以所示的文件名保存。\n\n${MORE(512, 1536)}`,
    "# SD 1.5 with a stack of four ControlNets on engines": `# SD 1.5，四个 ControlNet 叠加在引擎上运行

*TRT 应用 ControlNet* 的每一行都有自己的图像、**强度**、**起点**和**终点**：这里深度在 70 % 的步数处停止，线条从 30 % 处开始。强度 0 关闭该行。**行数**最多 16。

在 *Control image 1* 到 *4* 中放入图像，然后点击 **运行**。引擎只在各自的区间内运行：*What ran where* 显示每个引擎的调用次数。`,
    "# Build engines, and nothing else": `# 只构建引擎

1. 选择您的 checkpoint 和 ControlNet，以及引擎节点上的尺寸。
2. 在 **2 Engines** 的某个节点上点击**构建引擎**只构建这一个，或点击 **运行** 依次构建所有缺少的引擎。右侧的 *Engine 1* 到 *3* 会显示现有的引擎。

引擎保存在 *models/trt_engines*。使用相同模型和尺寸的每个工作流都会在那里找到它们；左侧的 *TRT 引擎* 面板可以列出、检查和删除引擎。`,
    "# Native beside engines": `# 原生与引擎对比

用同一个种子采样两次：**4 Native** 不使用本节点包，**5 On engines** 使用引擎。保存图像的节点把两张图并排保存（左边是原生），*Difference* 显示差异（黑色：没有差异），*What ran where* 显示每一次调用。

半精度在引擎中的舍入方式不同，因此有微弱差异是正常的。要比较 ComfyUI 在两个采样器上显示的时间，请运行两次，因为第一次运行还要构建引擎。`,
    "# SD 1.5, image to image with a ControlNet on engines": `# SD 1.5，图生图，ControlNet 在引擎上运行

1. **1 Models**：选择您的 checkpoint 和 ControlNet。
2. **3 Images and ControlNet**：放入 *Picture to repaint* 和 *Control image 1 (edges)*，例如它的边缘图。
3. 点击 **运行**。*K采样器* 上的**降噪** 决定改变多少。图片会被保存，*What ran where* 显示每一次调用。

256 到 1024 像素的图片适合引擎，更大的以原生方式运行；需要其他尺寸时，在引擎节点上选择**尺寸**。`,
};

/** A template's note in Chinese, or as it is. */
export function inChinese(note) {
    return NOTES[String(note).split("\n", 1)[0]] ?? note;
}
