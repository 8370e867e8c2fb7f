// Sentences and figures that the server tells in English, in Chinese. What is not in this list stays as the server says it:
// names of files, of other packs, and errors of libraries.

import { speaksChinese } from "./texts.mjs";

/** @type {[RegExp | string, string][]} in this order: the longer ones come before their parts */
const PHRASES = [
    // the report
    [/accelerated:? (\d+) of (\d+) models?/i, "已加速 $1 个模型，共 $2 个"], [/, about ([\d.]+)x faster than without/, "，速度约为不用引擎时的 $1 倍"],
    [/; about ([\d.]+ m?s) at normal speed\.?/, "；约 $1 按原速运行。"], [/, (\d+) of (\d+) calls/, "，$2 次调用中有 $1 次"], [/; (\d+) calls? at normal speed\.?/, "；$1 次调用按原速运行。"], [/, ([\d.]+ m?s) in all/, "，共 $1"],
    [/-> Build (\d+) missing engines?/, "→ 构建 $1 个缺少的引擎"], [/-> Build for /, "→ 构建尺寸 "], ["-> ", "→ "],
    [/(\d+) at normal speed/g, "$1 次按原速"], [/(?<=^|: )(\d+) on (\w+)/gm, "$1 次由 $2 运行"], [/, ([\d.]+ m?s) each/g, "，每次 $1"], [" beside its ControlNets", "（与 ControlNet 并行）"],
    [/, first ([\d.]+ m?s)/g, "，第一次 $1"], [/\(not compiled for (.+?): ran as a CUDA graph\)/, "（尚未为 $1 编译：以 CUDA 图运行）"], [/\(not compiled for (.+?): ran eagerly\)/, "（尚未为 $1 编译：未编译运行）"],
    ["did not run", "没有运行"], [/Slowest part: (.+) \((\d+) %\)/, "最慢的部分：$1（$2 %）"],
    [/No engine was asked for in this prompt: no TRT node lies before this one, or the sampler's result came from ComfyUI's cache\./, "此任务没有用到引擎：此节点之前没有 TRT 节点，或采样结果来自 ComfyUI 的缓存。"],
    // a stream
    [/Stream: (\d+) frames, ([\d.]+) a second;/, "流：$1 帧，每秒 $2 帧；"], [/; (\d+) repeated, because their frames were alike/, "；$1 帧因与前一帧相似而重复使用图像"], [/; (\d+) made again at normal speed/, "；$1 帧按原速重做"],
    ["Each frame was a sampling of its own, which takes longer: ", "每一帧单独采样，因此较慢："], ["the conditioning or the model carries weight hooks", "条件或模型带有权重钩子"], ["MultiGPU shares each step among GPUs", "MultiGPU 把每一步分到多个 GPU"], ["MultiGPU CFG Split made a copy of the model that no engine is known for", "MultiGPU CFG Split 复制了模型，而该副本没有已知的引擎"], ["remove MultiGPU CFG Split if you want the engine", "若要使用引擎，请移除 MultiGPU CFG Split"],
    ["latents of this kind of model are those of videos", "此类模型的潜空间是视频的形式"], [/another node \((.+?)\) acts on each sampling/, "另一个节点（$1）作用于每次采样"], ["another pack takes part in the sampling", "其他节点包参与采样"],
    ["this ComfyUI samples in a way that is not known", "此 ComfyUI 的采样方式未知"],
    ["Frames were sampled one after another: ", "逐帧采样："], ["the sampler is neither lcm nor euler", "采样器不是 lcm 或 euler"], ["a network of this kind may take all images of a batch for the same step", "此类网络可能把一批图像都当作同一步"],
    ["another node acts on each step", "另一个节点作用于每一步"], ["a prompt acts on a part of the steps or of the picture", "某个提示词只作用于部分步或图像的一部分"], ["a ControlNet acts on a part of the steps", "某个 ControlNet 只作用于部分步"],
    ["a ControlNet is of a kind with hints of its own", "某个 ControlNet 的控制图像由其自身制作"], ["the schedule leaves noise in a picture, or has a step without any", "调度器在图像中留下噪声，或有一步没有噪声"], ["the model sees each frame beside its prompt", "模型除提示词外还会看到每一帧"],
    // a comparison of two pictures
    ["TRT Compare: ", "TRT 比较："],
    ["The same picture: no value differs.", "图像相同：没有任何差异。"], ["Hardly a difference", "几乎没有差异"], ["Some difference", "有一些差异"], ["Different pictures", "图像不同"],
    [/Largest difference of a pixel: ([\d.e+-]+) of 255 \((.+)\)\./, "单个像素的最大差异：255 中的 $1（$2）。"], [/The difference is shown (\d+) times as bright\./, "差异图的亮度放大了 $1 倍。"], ["The difference is shown as it is.", "差异图未放大亮度。"],
    [/Of (\d+) pictures these are the figures of the worst\./, "共 $1 张图像，以上为差异最大的一张的数值。"], [/Broken: (\d+) values of both pictures are no numbers \(NaN\)\./, "已损坏：两张图像中有 $1 个值不是数字（NaN）。"],
    [/Broken: (\d+) values of the normal picture are no numbers \(NaN\)\./, "已损坏：普通图像中有 $1 个值不是数字（NaN）。"], [/Broken: (\d+) values of the accelerated picture are no numbers \(NaN\)\./, "已损坏：加速图像中有 $1 个值不是数字（NaN）。"],
    ["They are white in the difference.", "它们在差异图中为白色。"], ["SSIM was not computed: ", "未计算 SSIM："], ["it needs torchmetrics (pip install torchmetrics, with the Python that runs ComfyUI).", "需要 torchmetrics（用运行 ComfyUI 的 Python 执行 pip install torchmetrics）。"],
    [/a picture has to be (\d+) px wide and high\./, "图像的宽和高至少为 $1 像素。"],
    // a live stream
    ["The stream was stopped.", "实时流已停止。"], ["The stream has ended.", "实时流已结束。"], ["The stream was interrupted.", "实时流已中断。"],
    ["The stream ended with an error; ComfyUI's page and log say more.", "实时流因错误而结束；详情见 ComfyUI 页面和日志。"],
    [/No page or program sent frames for ([\d.]+) s, so the stream ended\./, "$1 秒内没有页面或程序发送画面，实时流已结束。"],
    ["Another page or program sends frames to this stream already; stop it there first.", "已有其他页面或程序向此实时流发送画面；请先在那里停止。"],
    ["This is not the token of a stream that runs, so the connection ends; ask for it again.", "这不是运行中的实时流的令牌，连接结束；请重新获取。"],
    [/The message was left out: (.+)\./, "此消息被忽略：$1。"], ["The frame is no JPEG, PNG or raw frame that can be read, so it was left out.", "此画面不是可读取的 JPEG、PNG 或原始画面，已被忽略。"],
    [/A frame is (\d+) to (\d+) pixels wide and high; this one has (\d+x\d+), so it was left out\./, "画面的宽和高须为 $1 到 $2 像素；此画面为 $3，已被忽略。"],
    // what becomes of the picture
    ["Same picture, normal speed", "图像相同，速度为原速"], ["Same picture as that node makes without engines", "图像与该节点不用引擎时相同"],
    ["The normal model runs: it leaves out what does not fit, or ends the prompt", "由普通模型运行：不适合的部分会被略去，或任务会中止"],
    // what to do
    ["press Build engine, or choose 'build first' or 'build meanwhile' on its node, and run", "点击“构建引擎”，或在节点上选择“先构建”或“同时构建”并运行"],
    ["switch TRT UNet Engine on again, or wire its engine into TRT Sampler Patch", "重新启用“TRT UNet 引擎”，或把它的引擎连接到“TRT 采样器补丁”"],
    ["fix what the message names and run again", "按提示解决后重新运行"], ["build it again: it was made by another version, on another machine or for another GPU", "请重新构建：它由其他版本、在其他机器上或为其他 GPU 构建"],
    ["build it again: its files are missing or damaged", "请重新构建：它的文件缺失或损坏"],
    ["press Check engine, or choose 'build first' on the engine node, to have it compared with the normal model", "点击“检查引擎”，或在引擎节点上选择“先构建”，与普通模型比较"],
    ["install the backend that the message names, or choose another on the engine node", "安装提示中的后端，或在引擎节点上选择其他后端"], ["build an engine for this GPU, or choose a backend that supports it", "为此 GPU 构建引擎，或选择支持它的后端"],
    ["wire the same model into the engine node and the sampler patch", "把同一个模型连接到引擎节点和采样器补丁"], ["nothing to do: it is used as soon as it is in the library", "无需操作：引擎一进入引擎库就会被使用"], ["choose the backend that the message names; if it names none, there is nothing to do", "请选择提示中的后端；若未提到后端，则无需操作"], ["nothing to do: the normal model applies it", "无需操作：原模型会应用它"],
    [/a LoRA gives (\S+) another shape, which no engine takes/, "有 LoRA 改变了 $1 的形状，没有引擎支持"],
    ["choose a wider Picture size on the engine node and build again", "在引擎节点上选择更大的“图像尺寸”并重新构建"], ["build again for ", "重新构建，尺寸 "],
    ["put the LoRA before the engine node and build again, or set 'Engine is for' to any checkpoint and LoRA, or leave it: the normal model applies it", "把 LoRA 放在引擎节点之前并重新构建，或把“引擎适用于”设为“任意检查点和 LoRA”，或保持不变：由普通模型应用它"],
    ["remove the node that does so if you want the engine", "如需使用引擎，请移除造成此情况的节点"], ["remove the hooks from the conditioning if you want the engine", "如需使用引擎，请移除条件上的钩子"],
    ["remove the node that computes the UNet by itself (DeepCache ...) if you want the engine", "如需使用引擎，请移除自行计算 UNet 的节点（DeepCache 等）"], ["choose a ControlNet, or a prompt, for the kind of model that is sampled", "请选择适合所采样模型的 ControlNet 或提示词"],
    ["add the input that the message misses, or remove the one that it names, if you want the engine", "如需使用引擎，请添加提示中缺少的输入，或移除提示中的输入"], ["see the log for the error; run again to retry the engine", "错误见日志；重新运行会再次尝试引擎"],
    [/put the engine node behind (\w+), whose patch engines compute/, "请把引擎节点放在 $1 之后，引擎会计算它的补丁"], [/put the engine node behind (\w+)/, "请把引擎节点放在 $1 之后"],
    [/the engine computes the patch of (\w+) too, and the model that is sampled has none/, "引擎还计算 $1 的补丁，而所采样的模型没有此补丁"], [/the engine computes the patch of (\w+) too, and the model that is sampled has that of another file/, "引擎还计算 $1 的补丁，而所采样的模型用的是另一个文件的补丁"],
    [/building the engine of (.+) with (\w+) needs about ([\d.]+ .B) of main memory and ([\d.]+ .B) are available/, "用 $2 构建 $1 的引擎约需 $3 内存，可用 $4"],
    [/checking the engine of (.+) with (\w+) needs about ([\d.]+ .B) of main memory and ([\d.]+ .B) are available/, "用 $2 检查 $1 的引擎约需 $3 内存，可用 $4"],
    [", so it was not started and the normal model keeps running; ", "，因此没有开始，普通模型继续运行；"], ["close other programs or unload ComfyUI's models, then build again", "请关闭其他程序或卸载 ComfyUI 的模型，然后重新构建"],
    [/, or choose the backend (\w+), which needs ([\d.]+ .B)/, "，或选择后端 $1，它需要 $2"], [/memory did not suffice \((.+)\), so no engine was made and the normal model keeps running; /, "内存不足（$1），因此没有生成引擎，普通模型继续运行；"],
    ["close other programs, unload ComfyUI's models or choose smaller sizes, then build again", "请关闭其他程序、卸载 ComfyUI 的模型或选择更小的尺寸，然后重新构建"],
    [/the build with (\w+) took longer than the ([\d.]+) minutes that the settings allow, so it was ended and the normal model keeps running; /, "用 $1 构建的时间超过设置所允许的 $2 分钟，因此已结束，普通模型继续运行；"],
    ["raise that limit in Settings > Hybrid TRT, or choose fewer sizes on the engine node", "请在“设置 > Hybrid TRT”中提高上限，或在引擎节点上选择更少的尺寸"],
    // why
    ["no engine wired in", "没有接入引擎"], [/\bno engine\b/, "没有引擎"], [/\bbuild failed\b/, "构建失败"], ["another machine builds it", "另一台机器正在构建它"], ["it took this build over, having seen no sign of life of this one for a while", "它接手了这次构建，因为一段时间没有看到本机的活动迹象"], ["stale engine", "引擎已过期"], ["broken engine", "引擎已损坏"], ["not checked here", "未在本机检验"], ["backend missing", "缺少后端"], ["wrong GPU", "GPU 不符"],
    ["engine of another model", "其他模型的引擎"], ["unsupported model", "不支持的模型"], ["size the engine was not built for", "引擎不含此尺寸"], ["hooks", "条件带有钩子"], ["weights patched", "权重被修改"], ["model patched", "模型被修改"], ["not called through TRT Sampler Patch", "未经“TRT 采样器补丁”调用"],
    [/(Fun control|LLLite) with (\d+) images at once/, "$1 同时有 $2 张图像"], [/LLLite with such an image or mask: /, "LLLite 的图像或遮罩不适用："],
    ["it computes with layers of the model", "它使用模型自身的层进行计算"], ["nothing to do: it runs at normal speed", "无需操作：它按原速运行"], ["made for another kind of model", "用于其他类型的模型"], ["unsupported input", "不支持的输入"], ["engine failed", "引擎出错"],
    ["the normal model gives values that are no numbers (NaN) too", "普通模型给出的值也不是数字（NaN）"], ["see what ComfyUI's own nodes give with this model, precision and prompt", "请查看 ComfyUI 自带节点以此模型、精度和提示词给出的结果"],
    [/(width|height) (\d+) px is outside the engine's (\d+) to (\d+) px/, "$2 像素超出引擎的 $3 到 $4 像素"], ["TRT UNet Engine is bypassed, muted or not connected", "“TRT UNet 引擎”被绕过、静音或未连接"],
    // what a build does
    ["waiting for other builds", "等待其他构建"], [/^starting\b/, "正在启动"], ["checking the engine's files", "检查引擎文件"], ["reading weights", "读取权重"], ["starting the exporter", "启动导出"], [/\bexporting\b/, "导出"], ["starting the compiler", "启动编译"],
    ["reading the graph", "读取计算图"], [/compiling for batch (\d+)/, "编译（批量 $1）"], [/\bcompiling\b/, "编译"], [/ with (\d+) processes/, "（$1 个进程）"], ["timing the normal model", "测量普通模型"], ["running the normal model", "运行普通模型"],
    [/comparing batch (\d+) with the normal model/, "与普通模型比较（批量 $1）"], ["comparing with the normal model", "与普通模型比较"], [/^measuring\b/, "测量"], [/^saving\b/, "保存"], [/^building with (\w+)/, "用 $1 构建"],
    [/Left as they were, because it is not clear where they lead: (.+)\./, "以下内容无法确定去向，保持原样：$1。"], [/filters of nodes ([\d, ]+)/, "节点 $1 的筛选条件"],
    // an engine in figures
    [/up to (\d+) images/g, "最多 $1 张图像"], [/\b(\d+) images?\b/g, "$1 张图像"], [/(\d+) (?:to|-) (\d+) px/g, "$1 到 $2 像素"], [/(\d+) px/g, "$1 像素"], [/(\d+) tokens/g, "$1 词元"], [/\bbatch (\d+)/g, "批量 $1"],
    [/up to (\d+) latent frames/g, "最多 $1 个潜空间帧"], [/(\d+) latent frames?/g, "$1 个潜空间帧"], [/(\d+) control videos/g, "$1 个控制视频"],
    ["takes any LoRA", "适用任意 LoRA"], [/ is experimental: never run on a GPU by us/, " 为实验性：我们从未在 GPU 上运行过"], [/\bother weights$/, "其他权重"], [" on live weights", "（实时权重）"], [/compiled for /, "已编译 "],
];

/** A text of the server's as people read it. */
export function said(text) {
    return speaksChinese() ? PHRASES.reduce((now, [phrase, words]) => now.replace(phrase, words), text) : text;
}
