// Sentences of the server in Chinese. The pack writes its sentences once, in English; a phrase here is a part of one as the
// Python source has it, with {} for values. tests/page/test_chinese.py holds both against each other.

import { speaksChinese } from "./texts.mjs";

/** @type {[RegExp | string, string][]} in this order: the longer ones come before their parts; $1 is the first value */
const SENTENCES = [
    // the report
    [/accelerated:? (\d+) of (\d+) models?/i, "已加速 $1 个模型，共 $2 个"], [/, about ([\d.]+)x faster than without/, "，速度约为不用引擎时的 $1 倍"],
    [/; about ([\d.]+ m?s) at normal speed\.?/, "；约 $1 按原速运行。"], [/, (\d+) of (\d+) calls/, "，$2 次调用中有 $1 次"], [/; (\d+) calls? at normal speed\.?/, "；$1 次调用按原速运行。"], [/, ([\d.]+ m?s) in all/, "，共 $1"],
    [/-> Build (\d+) missing engines?/, "→ 构建 $1 个缺少的引擎"], [/-> Build for /, "→ 构建尺寸 "], ["-> ", "→ "],
    [/(\d+) at normal speed/g, "$1 次按原速"], [/(?<=^|: )(\d+) on (\w+)/gm, "$1 次由 $2 运行"], [/, ([\d.]+ m?s) each/g, "，每次 $1"], [" beside its ControlNets", "（与 ControlNet 并行）"],
    [/, first ([\d.]+ m?s)/g, "，第一次 $1"], [/\(not compiled for (.+?): ran uncompiled\)/, "（尚未为 $1 编译：未编译运行）"],
    ["did not run", "没有运行"], [/Slowest part: (.+) \((\d+) %\)/, "最慢的部分：$1（$2 %）"],
    [/No engine was asked for in this prompt: no TRT node lies before this one, or the sampler's result came from ComfyUI's cache\./, "此任务没有用到引擎：此节点之前没有 TRT 节点，或采样结果来自 ComfyUI 的缓存。"],
    // a stream
    [/Stream: (\d+) frames, ([\d.]+) a second;/, "流：$1 帧，每秒 $2 帧；"], [/; (\d+) repeated, because their frames were alike/, "；$1 帧因与前一帧相似而重复使用图像"], [/; (\d+) made again at normal speed/, "；$1 帧按原速重做"],
    ["Each frame was a sampling of its own, which takes longer: ", "每一帧单独采样，因此较慢："], ["a prompt or the model brings a LoRA or checkpoint of its own (hooks)", "提示词或模型自带 LoRA 或检查点（钩子）"], ["MultiGPU shares each step among GPUs", "MultiGPU 把每一步分到多个 GPU"], ["MultiGPU CFG Split made a copy of the model that no engine is known for", "MultiGPU CFG Split 复制了模型，而该副本没有已知的引擎"], ["remove MultiGPU CFG Split if you want the engine", "若要使用引擎，请移除 MultiGPU CFG Split"],
    ["this kind of model has latents of videos", "此类模型的潜空间是视频的形式"], [/another node \((.+?)\) acts on each sampling/, "另一个节点（$1）作用于每次采样"], ["another pack takes part in the sampling", "其他节点包参与采样"],
    ["this ComfyUI samples in a way that is not known", "此 ComfyUI 的采样方式未知"],
    ["Frames were sampled one after another: ", "逐帧采样："], ["the sampler is neither ", "采样器不是 "], ["a network of this kind may take all images of a batch for the same step", "此类网络可能把一批图像都当作同一步"],
    ["another node acts on each step", "另一个节点作用于每一步"], ["a prompt acts on a part of the steps or of the picture", "某个提示词只作用于部分步或图像的一部分"], ["a ControlNet acts on a part of the steps", "某个 ControlNet 只作用于部分步"],
    ["a ControlNet is of a kind with hints of its own", "某个 ControlNet 的控制图像由其自身制作"], ["the schedule leaves noise in a picture, or has a step without any", "调度器在图像中留下噪声，或有一步没有噪声"], ["the model sees each frame beside its prompt", "模型除提示词外还会看到每一帧"],
    // a comparison of two pictures
    ["TRT Compare: ", "TRT 比较："],
    ["The same picture: no value differs.", "图像相同：没有任何差异。"], ["Hardly a difference", "几乎没有差异"], ["Some difference", "有一些差异"], ["Different pictures", "图像不同"],
    [/Largest difference of a pixel: ([\d.e+-]+) of 255 \((.+)\)\./, "单个像素的最大差异：255 中的 $1（$2）。"], [/The difference is shown (\d+) times as bright\./, "差异图的亮度放大了 $1 倍。"], ["The difference is shown as it is.", "差异图未放大亮度。"],
    [/Of (\d+) pictures these are the figures of the worst\./, "共 $1 张图像，以上为差异最大的一张的数值。"], ["Broken: {} values of {} are no numbers (NaN).", "已损坏：$2中有 $1 个值不是数字（NaN）。"], ["both pictures", "两张图像"], ["the normal picture", "普通图像"], ["the accelerated picture", "加速图像"],
    ["They are white in the difference.", "它们在差异图中为白色。"], ["SSIM was not computed: ", "未计算 SSIM："], ["it needs torchmetrics (pip install torchmetrics, with the Python that runs ComfyUI)", "需要 torchmetrics（用运行 ComfyUI 的 Python 执行 pip install torchmetrics）"],
    ["a picture has to be {} px wide and high", "图像的宽和高至少为 $1 像素"],
    // a live stream
    ["The stream was stopped.", "实时流已停止。"], ["The stream has ended.", "实时流已结束。"], ["The stream was interrupted.", "实时流已中断。"],
    ["The stream ended with an error; ComfyUI's page and log say more.", "实时流因错误而结束；详情见 ComfyUI 页面和日志。"],
    [/No page or program sent frames for ([\d.]+) s, so the stream ended\./, "$1 秒内没有页面或程序发送画面，实时流已结束。"],
    ["Another page or program sends frames to this stream already; stop it there first.", "已有其他页面或程序向此实时流发送画面；请先在那里停止。"],
    ["This is not the token of a stream that runs, so the connection ends; ask for it again.", "这不是运行中的实时流的令牌，连接结束；请重新获取。"],
    [/The message was left out: (.+)\./, "此消息被忽略：$1。"], ["The frame is no JPEG, PNG or raw frame that can be read, so it was left out.", "此画面不是可读取的 JPEG、PNG 或原始画面，已被忽略。"],
    ["The raw frame has no whole header, so it was left out.", "原始画面的文件头不完整，已被忽略。"], ["A raw frame of {}x{} pixels has 3 bytes each; this one has not, and was left out.", "$1x$2 像素的原始画面每像素须有 3 字节；此画面不符，已被忽略。"], ["Another TRT Stream runs live on this GPU, so this one did not start; stop that one first.", "此 GPU 上已有另一个 TRT 流在运行，因此这一个没有启动；请先停止那一个。"],
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
    ["remove the node that does so if you want the engine", "如需使用引擎，请移除造成此情况的节点"], ["remove that LoRA's hook nodes if you want the engine", "如需使用引擎，请移除该 LoRA 的钩子节点"],
    ["remove the node that computes the UNet by itself (DeepCache ...) if you want the engine", "如需使用引擎，请移除自行计算 UNet 的节点（DeepCache 等）"], ["choose a ControlNet, or a prompt, for the kind of model that is sampled", "请选择适合所采样模型的 ControlNet 或提示词"],
    ["free GPU memory if you want the engine: with more of it both are timed again", "如需使用引擎，请释放显存：显存更多时会重新计时比较"], ["nothing to do: later runs use the faster of both", "无需操作：之后的运行会使用较快的一方"],
    ["this run times the normal model; the engine takes {} a call", "本次运行为普通模型计时；引擎每次调用用时 $1"], ["a call takes {} on the normal model, and {} on the engine", "每次调用普通模型用时 $1，引擎用时 $2"],
    ["add the input that the message misses, or remove the one that it names, if you want the engine", "如需使用引擎，请添加提示中缺少的输入，或移除提示中的输入"], ["see the log for the error; run again to retry the engine", "错误见日志；重新运行会再次尝试引擎"],
    [/put the engine node behind (\w+), whose patch engines compute/, "请把引擎节点放在 $1 之后，引擎会计算它的补丁"], ["put the engine node behind the node that chooses attention", "请把引擎节点放在选择注意力的节点之后"], [/put the engine node behind (\w+)/, "请把引擎节点放在 $1 之后"],
    ["Attention is by {}, as native computes it", "注意力由 $1 计算，与普通模型相同"],
    ["the engine computes the patch of {} too, and the model that is sampled has none", "引擎还计算 $1 的补丁，而所采样的模型没有此补丁"], ["the engine computes the patch of {} too, and the model that is sampled has that of another file", "引擎还计算 $1 的补丁，而所采样的模型用的是另一个文件的补丁"],
    ["building the engine of {} with {} needs about {} of main memory and {} are available", "用 $2 构建 $1 的引擎约需 $3 内存，可用 $4"],
    ["checking the engine of {} with {} needs about {} of main memory and {} are available", "用 $2 检查 $1 的引擎约需 $3 内存，可用 $4"],
    [", so it was not started and the normal model keeps running; ", "，因此没有开始，普通模型继续运行；"], ["close other programs or unload ComfyUI's models, then build again", "请关闭其他程序或卸载 ComfyUI 的模型，然后重新构建"],
    [", or choose the backend {}, which needs ", "，或选择后端 $1，它需要 "], ["memory did not suffice (", "内存不足（"],
    ["close other programs, unload ComfyUI's models or choose smaller sizes, then build again", "请关闭其他程序、卸载 ComfyUI 的模型或选择更小的尺寸，然后重新构建"],
    ["the build with {} took longer than the {} minutes that the settings allow", "用 $1 构建的时间超过设置所允许的 $2 分钟"],
    ["raise that limit in Settings > Hybrid TRT, or choose fewer sizes on the engine node", "请在“设置 > Hybrid TRT”中提高上限，或在引擎节点上选择更少的尺寸"],
    // why there is no engine after a build
    ["so no engine was made and the normal model keeps running", "因此没有生成引擎，普通模型继续运行"], ["so none was made and the normal model keeps running", "因此没有生成引擎，普通模型继续运行"], ["nothing was built and the normal model keeps running", "没有构建引擎，普通模型继续运行"],
    ["so it was ended and the normal model keeps running", "因此已结束，普通模型继续运行"], ["so it is not used and the normal model runs", "因此不使用它，由普通模型运行"], ["nothing was built: ", "没有构建引擎："],
    ["{} cannot build in this process, because polygraphy already drives the other TensorRT in it", "$1 无法在此进程中构建，因为 polygraphy 已在其中使用另一个 TensorRT"], ["restart ComfyUI and build again", "请重新启动 ComfyUI 后再构建"],
    ["TensorRT cannot read this model ({} is missing)", "TensorRT 无法读取此模型（缺少 $1）"], ["TensorRT cannot read this model ({} is {} and not {})", "TensorRT 无法读取此模型（$1 是 $2，应为 $3）"], ["TensorRT builds only on the GPU that the engine is for: that is {}, and here is {}", "TensorRT 只能在引擎所用的 GPU 上构建：引擎用于 $1，此处为 $2"], ["build it on that machine", "请在那台机器上构建"],
    ["the compiled model differs from the normal model by {} in {} at {} (", "编译后的模型在 $2 处与普通模型相差 $1：$3（"], ["the exported graph differs from the normal model by {} in {} at {} (", "导出的计算图在 $2 处与普通模型相差 $1：$3（"], ["try precision float32, and report this model if that fails too", "请试用精度 float32；若仍失败，请报告此模型"],
    ["torch could not compile this model (", "torch 无法编译此模型（"], ["the build's log has more", "详情见构建日志"], ["see the build's log", "请查看构建日志"], [", and report this model if it happens again", "；若再次发生，请报告此模型"], ["build again with precision float32 or another backend, and report this model", "请用精度 float32 或其他后端重新构建，并报告此模型"],
    ["this model cannot be compiled here", "此模型无法在此编译"], ["please report it", "请报告此模型"],
    ["{} is a part of another pack's own, which no engine knows", "$1 是其他节点包的部件，没有引擎支持"], ["remove the node that puts it in", "请移除加入它的节点"], ["remove the node that replaced it", "请移除替换它的节点"], ["{} has a part that cannot be handed to the builder (", "$1 有无法交给构建程序的部件（"], ["remove the node that changes this model, or report it", "请移除改变此模型的节点，或报告此问题"],
    ["the weights of {} have another form than its layer", "$1 的权重与其层的形式不符"], ["the weights of {} changed again and again while they were read", "读取时 $1 的权重一再改变"], ["build while nothing samples", "请在没有采样时构建"], ["report this model", "请报告此模型"], [", so the engine was not kept and the normal model keeps running; report this", "，因此没有保留引擎，普通模型继续运行；请报告此问题"], ["was made by a version that looked at fewer settings of a network's layers", "由较早的版本构建，该版本检查的网络层设置较少"],
    ["has no {}, 因此", "不支持 $1，因此"], ["choose {} as the engine node's precision", "请在引擎节点上选择精度 $1"],
    ["the builder failed while {} (", "构建程序在“$1”时失败（"], ["the builder did nothing for {} minutes while {},", "构建程序在“$2”时 $1 分钟没有任何活动，"], ["see that its disk answers and that nobody has stopped it, then build again", "请确认其磁盘有响应且没有人停止它，然后重新构建"],
    ["the builder {} while {},", "构建程序 $1（当时：$2），"], ["ended with exit status ", "结束，状态 "], ["was ended by ", "被结束，信号 "], [", most often because the machine ran out of memory", "，多半因为机器内存不足"], ["crashed with status ", "崩溃，状态 "], ["close other programs or choose a smaller profile, and build again", "请关闭其他程序或选择更小的尺寸，然后重新构建"], [" Its last words: ", " 最后的输出："],
    ["Its build was cancelled; 'build first' starts it again.", "构建已取消；“先构建”会重新开始。"], ["An engine is being built in the background ({}) and used from the next prompt on.", "引擎正在后台构建（$1），从下一次运行起使用。"], ["A larger one was not built: ", "没有构建更大的引擎："], ["This ComfyUI cannot build it, the command line can; the log says why.", "此 ComfyUI 无法构建它，命令行可以；原因见日志。"],
    // the disk and the library's settings
    [/Nothing was changed(?: in it| in the library)? and the normal model keeps running; /, "没有改变任何内容，普通模型继续运行；"], ["the library {} could not be used (", "引擎库 $1 无法使用（"], ["check this folder and its disk", "请检查此文件夹及其磁盘"], ["{} needs about {} in {} and its disk has {} free", "$1 约需 $2（位于 $3），其磁盘剩余 $4"], ["delete engines that you no longer use", "请删除不再使用的引擎"],
    [", or point 'trt_engines' in ComfyUI's extra_model_paths.yaml to another disk", "，或在 ComfyUI 的 extra_model_paths.yaml 中把 trt_engines 指向另一个磁盘"], ["the disk of {} is full", "$1 所在的磁盘已满"], ["{} could not be changed ({}): one of its files is in use, or ComfyUI may not write there", "$1 无法更改（$2）：其中有文件正在使用，或 ComfyUI 无权写入"],
    ["press 'Free model and node cache', end other programs that use these engines, and try again", "请点击“释放模型和节点缓存”，结束使用这些引擎的其他程序，然后重试"], ["{} cannot be written (", "$1 无法写入（"], ["give ComfyUI the right to write there", "请允许 ComfyUI 在那里写入"], ["{} has to be a number of {}; nothing was changed", "$1 须为数字（$2）；没有改变"], ["{} has to lie between 0 (none) and {} {}; nothing was changed", "$1 须在 0（无）到 $2 之间（$3）；没有改变"],
    ["TensorRT's optimization level has to be a whole number; nothing was changed", "TensorRT 的优化级别须为整数；没有改变"], ["The limit of the engine library", "引擎库的上限"], ["The longest build", "最长构建时间"], ["{} needs about {}, the engines take {}, and the settings allow {} in all", "$1 约需 $2，引擎已占 $3，设置共允许 $4"], [", or raise the limit in Settings > Hybrid TRT", "，或在“设置 > Hybrid TRT”中提高上限"],
    // why
    ["no engine wired in", "没有接入引擎"], [/\bno engine\b/i, "没有引擎"], ["build failed", "构建失败"], ["the build was cancelled", "构建已取消"], ["another machine builds it", "另一台机器正在构建它"], ["it took this build over, having seen no sign of life of this one for a while", "它接手了这次构建，因为一段时间没有看到本机的活动迹象"], ["outdated engine", "引擎已过期"], ["damaged engine", "引擎已损坏"], ["not checked here", "未在本机检验"], ["backend missing", "缺少后端"], ["wrong GPU", "GPU 不符"],
    ["engine of another model", "其他模型的引擎"], ["unsupported model", "不支持的模型"], ["size the engine was not built for", "引擎不含此尺寸"], ["LoRA tied to a prompt", "LoRA 绑定在提示词上"], ["weights changed", "权重被修改"], ["changed by another node", "被其他节点修改"], ["not called through TRT Sampler Patch", "未经“TRT 采样器补丁”调用"],
    [/(Fun control|LLLite) with (\d+) images at once, which engines do not do/, "$1 同时有 $2 张图像，引擎不支持"], [/LLLite with such an image or mask \((.+?)\), which engines do not do/, "LLLite 的图像或遮罩（$1）不受引擎支持"],
    ["it computes with layers of the model", "它使用模型自身的层进行计算"], ["nothing to do: it runs at normal speed", "无需操作：它按原速运行"], ["made for another kind of model", "用于其他类型的模型"], ["unsupported input", "不支持的输入"], ["larger than the free GPU memory", "超出空闲显存"], ["engine failed", "引擎出错"],
    ["the normal model gives values that are no numbers (NaN) too", "普通模型给出的值也不是数字（NaN）"], ["see what ComfyUI's own nodes give with this model, precision and prompt", "请查看 ComfyUI 自带节点以此模型、精度和提示词给出的结果"],
    [" is outside the engine's ", "超出引擎的 "], ["TRT UNet Engine is bypassed, muted or not connected", "“TRT UNet 引擎”被绕过、静音或未连接"],
    // what a build does
    ["waiting for other builds", "等待其他构建"], ["checking the engine's files", "检查引擎文件"], ["reading weights", "读取权重"], ["preparing the export", "准备导出"], [/\bexporting\b/, "导出"], ["starting the compiler", "启动编译"],
    [/\bpreparing\b/, "准备"], [/\bcompiling\b/, "编译"], ["timing the normal model", "测量普通模型"], ["running the normal model", "运行普通模型"],
    [/part (\d+) of (\d+)/, "第 $1 部分（共 $2 部分）"], ["comparing with the normal model", "与普通模型比较"], ["comparing {} with the normal model", "与普通模型比较（$1）"], [/^saving\b/i, "保存"], [/^starting\b/, "正在启动"], ["waiting for the running prompt", "等待正在运行的任务"], ["waiting for memory", "等待内存"], [/^building with (\w+)/i, "用 $1 构建"],
    [/Left as they were, because it is not clear where they lead: (.+)\./, "以下内容无法确定去向，保持原样：$1。"], ["filters of nodes", "以下节点的筛选条件："],
    // an engine in figures
    [/up to (\d+) images/g, "最多 $1 张图像"], [/\b(\d+) images?\b/g, "$1 张图像"], [/(\d+) (?:to|-) (\d+) px/g, "$1 到 $2 像素"], [/(\d+) px/g, "$1 像素"], [/(\d+) tokens of video/g, "视频 $1 词元"], [/ with ([\d.]+) s of sound/g, "（声音 $1 秒）"], [/(\d+) reference tokens/g, "$1 个参考词元"], [/(\d+) tokens/g, "$1 词元"], [/up to (\d+) in a batch/g, "每批最多 $1 张"], [/about (\d+x\d+)/g, "约 $1"], [/\bbatch (\d+)/g, "批量 $1"],
    [/up to (\d+) frames/g, "最多 $1 帧"], [/(\d+) frames?\b/g, "$1 帧"], [/(\d+) control videos/g, "$1 个控制视频"],
    ["takes any LoRA", "适用任意 LoRA"], [/(?: is )?experimental: never run on a GPU by us/, " 为实验性：我们从未在 GPU 上运行过"], [/\bother weights$/, "其他权重"], [" on live weights", "（实时权重）"], [/compiled for /, "已编译 "],
];

/** @type {[RegExp, string][]} */
export const PHRASES = SENTENCES.map(([phrase, words]) => [phrase instanceof RegExp ? phrase : pattern(phrase), words]);

function pattern(sentence) {
    return new RegExp(sentence.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replaceAll("{}", "(.+?)"), "i"); // a sentence may begin with it
}

/** A text of the server's as people read it. */
export function said(text) {
    return speaksChinese() ? PHRASES.reduce((now, [phrase, words]) => now.replace(phrase, words), text) : text;
}
