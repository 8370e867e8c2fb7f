// The words that the pack's own widgets and panel use, in the page's languages.

/** @type {Record<string, Record<string, string>>} */
const TEXTS = {
    en: {
        accelerate: "Accelerate this workflow", accelerateRemove: "Remove acceleration",
        accelerateDone: "TRT Accelerate is in your workflow now. Build its engines in the panel, then press Run.",
        accelerateNothing: "Nothing to accelerate: this workflow has no model loader without an engine.",
        accelerateRemoved: "Nodes taken out: {count}. The workflow is wired as before.", accelerateNone: "This workflow has no such nodes.",
        build: "Build engine", rebuild: "Build again", cancel: "Cancel build",
        unknown: "Not looked up yet", unknownHint: "Press Build engine, or run once: then the node knows its engine.",
        unwired: "No model connected", unwiredHint: "Connect a model to build its engine.",
        off: "Switched off", offHint: "Its model runs native.", offBuild: "A muted or bypassed node builds no engine.",
        offMuted: "TRT Apply ControlNet leaves its row out. Bypass this node to run it native.",
        offInside: "Its subgraph is muted or bypassed, so this node takes no part in prompts.",
        none: "No engine", noneHint: "The model runs native. Press Build engine.",
        asked: "Loading the model", askedHint: "The build starts when the prompts before it have run.",
        queued: "Waiting", building: "Building", ready: "Ready", stale: "Stale", unchecked: "Not checked here", failed: "Build failed",
        unavailable: "Cannot use an engine", cancelled: "The last build was cancelled.",
        whyLora: "No engine for this LoRA setting yet.", whyCheckpoint: "No engine is known for this model yet.",
        whySettings: "No engine is known for these settings yet.",
        soonNative: "Native serves; building takes {time}.", soonNow: "The next run builds it first: {time}.",
        soonNowPerhaps: "The next run builds it first if there is none: {time}.",
        soonBackground: "The next run starts the build ({time}) and runs native meanwhile.",
        soonLive: "The torch backend serves without a build and follows LoRAs; a build ({time}) makes it faster.",
        soonLiveNow: "The torch backend follows LoRAs and checkpoints; only what was never built here is built first: {time}.",
        aboutSeconds: "about {count} s", aboutMinutes: "about {count} min", someTime: "minutes for a full-size model",
        smaller: "Smaller than this node's sizes: larger calls run native. Press Build again.",
        smallerLive: "Smaller than this node's sizes: larger calls run uncompiled on torch. Press Build again.",
        ran: "Last run: {engine} calls on {backend}", mixed: "Last run: {native} of {all} calls native",
        native: "Last run: all {all} calls native", badge: "native", badgePart: "partly native",
        buildAll: "Build {count} missing engines", buildOne: "Build the missing engine", timed: "{words} ({time})", cancelAll: "Cancel all builds", jump: "Go to this node",
        allReady: "All engines of this workflow are ready ({ready})", allMissing: "{missing} of {total} engines are missing",
        allBusy: "Building: {busy} of {batch} engines left",
        log: "Show log", logOf: "Log of the build: {label}", close: "Close", no: "Cancel", copy: "Copy", copied: "Copied", copyFailed: "Not copied", noLog: "The build wrote nothing.",
        ofAbout: "{elapsed} of about {expected}",
        misfit: "{size} does not fit this engine: it will run native.",
        misfitSettings: "{size} does not fit this node's sizes: an engine built for them would not serve it.",
        uncompiled: "Not compiled for {size}: it runs as a CUDA graph until that is built.",
        noneOfSize: "No engine for {size}: it runs native until that is built.",
        ranGraph: "Not compiled for {size}: {count} calls ran as a CUDA graph",
        ranPlainly: "Not compiled for {size}: {count} calls ran uncompiled",
        buildFor: "Build for {size}", badgeMisfit: "size",
        rebuildWhere: "Add a {node} node with {label} to the graph and press Build engine there.",
        rebuildStarted: "{label} is built again on its node.",
        built: "Engine built", builtDetail: "{label}: {size}, {seconds}, matches native (checked, error {error})",
        missingFile: "Missing file {file}: choose or download it in {node}.",
        failedToast: "The engine was not built", cancelledToast: "Build cancelled",
        panel: "TRT engines", refresh: "Refresh", filter: "Filter", empty: "No engines yet.",
        useNative: "use native", buildNow: "build now", buildBackground: "build in background", auto: "auto",
        weightsFixed: "built in", weightsAny: "replaceable", anyWeights: "any LoRA",
        row_control_net: "control_net_{number}", row_image: "image_{number}", row_strength: "strength_{number}",
        row_start: "start_{number}", row_end: "end_{number}",
        faster: "{times}x as fast as native on this GPU", slower: "slower than native on this GPU ({times}x)",
        refit: "new weights (LoRA, checkpoint) take up to {time}",
        checked: "matches native (checked)", checkedHint: "Largest difference from native when it was built: {error} of the largest value.",
        readyNext: "Ready, used from the next run", buildUnwired: "Connect a model to build",
        sizesWrong: "{low} {above} is above {high} {below}.", sizeKept: "{name} stays {value}.",
        noMatch: "No engine matches the filter.", begin1: "Press Accelerate this workflow, or open a template.",
        begin2: "Connect your models.", begin3: "Press Build engine on a node, or Run.", beginTemplates: "Open the templates", builds: "Builds", engines: "Engines",
        use: "{count} engines, {size}; {free} free", delete: "Delete", verify: "Verify", rowDetails: "Details …", deleteEngine: "Delete …",
        deleteOne: "Delete engine?", deleteMany: "Delete {count} engines?", deleteSelected: "Delete selected …",
        deleteOneText: "{name}, {profile} ({size}). Its model runs native until it is built again.",
        deleteManyText: "{size} become free. Their models run native until they are built again.",
        deleteDamagedText: "{name} ({size}) is damaged and serves nobody.",
        select: "Select {name}", selectAll: "Select all shown", selected: "{count} selected, {size}", menuOf: "More for {name}",
        sort: "Sort by", sortName: "Name", sortDate: "Newest", sortSize: "Largest", sortUsed: "Last used",
        groupOf: "{count} · {size}", damagedGroup: "Damaged", damagedRow: "Damaged; delete it",
        damagedDetails: "This engine cannot be read and serves nobody. Delete it, and build it again where it is needed.",
        builtIn: "built {date} in {time}", builtOn: "built {date}", clearFinished: "Clear finished", buildsBefore: "waits for {count} before it",
        lastUsed: "last used {date}", usedOn: "used {date}", neverUsed: "not used yet",
        deletedMany: "Deleted: {count} engines, {size}",
        uncheckedHint: "This engine was built without this GPU. Press Check engine: it is compared with native and then serves.",
        check: "Check engine",
        verified: "{name} is as it was built.", damaged: "{name} is damaged: {text}. Build it again.",
        deleted: "{name} was deleted",
        failedAction: "That did not work", error: "error {error}", broken: "Damaged", done: "Done",
        stateCancelled: "Cancelled", running: "Running", unet: "UNet", controlnet: "ControlNet",
        notRun: "Run once: then this node says what served.", noRunYet: "Not run yet", noCalls: "No calls",
        allOnEngines: "All on engines", someNative: "Native calls", details: "Details",
        limit: "Largest size of all engines (GB)",
        limitHint: "0 is no limit. A build that does not fit is refused; nothing is deleted by itself.",
        limitKept: "Saved; the next build keeps it.",
        minutes: "Longest build (minutes)",
        minutesHint: "0 is no limit. A build that takes longer is given up, and native keeps serving.",
        level: "TensorRT: optimization level",
        levelHint: "1 builds fastest, 5 searches longest for fast kernels; 0 is TensorRT's own choice.",
        folderHint: "Builds go to the first folder. For another one, write it under trt_engines in ComfyUI's extra_model_paths.yaml "
            + "and restart; the engines in the old folder are still found.",
        presets: "Picture sizes", presetLabel: "sizes", presetMore: "Show all settings …", presetLess: "Hide the settings",
        presetHint: "Which pictures the engine takes. Auto follows the picture that the workflow asks for. The numbers are among all settings.",
        presetOwn: "Custom: {min_size} to {max_size} px × {max_images}", sizesCustom: "Custom …",
        sizesAuto: "Auto (this workflow: {size})", sizesAutoFit: "Auto (fits the model)",
        presetFitOf: "Auto (fits {family}: {min_size} to {max_size} px)",
        presetSdxl: "SDXL, all usual formats", presetSd15: "SD 1.5, all usual formats", sizesToAll: "Apply to all engine nodes",
    },
    zh: {
        accelerate: "加速此工作流", accelerateRemove: "移除加速",
        accelerateDone: "“TRT 加速”已加入您的工作流。在面板中构建它的引擎，然后点击运行。",
        accelerateNothing: "没有可加速的内容：此工作流中没有尚无引擎的模型加载器。",
        accelerateRemoved: "移除了 {count} 个节点，连线已恢复原样。", accelerateNone: "此工作流中没有这样的节点。",
        build: "构建引擎", rebuild: "重新构建", cancel: "取消构建",
        unknown: "尚未查找", unknownHint: "点击“构建引擎”，或运行一次，节点就知道自己的引擎。",
        unwired: "未连接模型", unwiredHint: "连接模型后才能构建引擎。",
        off: "已关闭", offHint: "模型以原生方式运行。", offBuild: "被静音或绕过的节点不会构建引擎。",
        offMuted: "“TRT 应用 ControlNet”会跳过它所在的行。绕过此节点则以原生方式运行。",
        offInside: "所在的子图被静音或绕过，此节点不参与运行。",
        none: "没有引擎", noneHint: "模型以原生方式运行。点击“构建引擎”。",
        asked: "正在加载模型", askedHint: "前面的任务运行完后开始构建。",
        queued: "等待中", building: "构建中", ready: "就绪", stale: "已过期", unchecked: "未在本机检验", failed: "构建失败",
        unavailable: "无法使用引擎", cancelled: "上次构建已取消。",
        whyLora: "当前 LoRA 设置还没有引擎。", whyCheckpoint: "此模型还没有已知的引擎。", whySettings: "当前设置还没有已知的引擎。",
        soonNative: "以原生方式运行；构建需要{time}。", soonNow: "下一次运行会先构建：{time}。",
        soonNowPerhaps: "如果没有引擎，下一次运行会先构建：{time}。",
        soonBackground: "下一次运行会开始构建（{time}），其间以原生方式运行。",
        soonLive: "torch 后端无需构建即可运行，并跟随 LoRA；构建（{time}）会更快。",
        soonLiveNow: "torch 后端跟随 LoRA 和模型；只有从未在本机构建过的才会先构建：{time}。",
        aboutSeconds: "约 {count} 秒", aboutMinutes: "约 {count} 分钟", someTime: "完整尺寸的模型要数分钟",
        smaller: "引擎的尺寸范围小于此节点的设置：更大的调用以原生方式运行。请重新构建。",
        smallerLive: "引擎的尺寸范围小于此节点的设置：更大的调用由 torch 未经编译地运行。请重新构建。",
        ran: "上次运行：{engine} 次调用在 {backend} 上", mixed: "上次运行：{all} 次调用中有 {native} 次为原生",
        native: "上次运行：全部 {all} 次调用均为原生", badge: "原生", badgePart: "部分原生",
        buildAll: "构建 {count} 个缺少的引擎", buildOne: "构建缺少的引擎", timed: "{words}（{time}）", cancelAll: "取消全部构建", jump: "转到此节点",
        allReady: "此工作流的引擎全部就绪（{ready} 个）", allMissing: "{total} 个引擎中缺少 {missing} 个",
        allBusy: "构建中：{batch} 个引擎中还剩 {busy} 个",
        log: "查看日志", logOf: "构建日志：{label}", close: "关闭", no: "取消", copy: "复制", copied: "已复制", copyFailed: "未能复制", noLog: "构建没有输出。",
        ofAbout: "{elapsed}，预计约 {expected}",
        misfit: "{size} 超出此引擎的范围，将以原生方式运行。",
        misfitSettings: "{size} 超出此节点的尺寸：按这些尺寸构建的引擎无法处理。",
        uncompiled: "尚未为 {size} 编译：构建之前以 CUDA 图运行。",
        noneOfSize: "没有 {size} 的引擎：构建之前以原生方式运行。",
        ranGraph: "尚未为 {size} 编译：{count} 次调用以 CUDA 图运行",
        ranPlainly: "尚未为 {size} 编译：{count} 次调用未编译运行",
        buildFor: "为 {size} 构建", badgeMisfit: "尺寸",
        rebuildWhere: "请在图中添加 {node} 节点并接入 {label}，再点击“构建引擎”。",
        rebuildStarted: "{label} 正在其节点上重新构建。",
        built: "引擎已构建", builtDetail: "{label}：{size}，{seconds}，与原生一致（已检验，误差 {error}）",
        missingFile: "缺少文件 {file}：请在“{node}”中选择或下载它。",
        failedToast: "引擎未能构建", cancelledToast: "构建已取消",
        panel: "TRT 引擎", refresh: "刷新", filter: "筛选", empty: "还没有引擎。",
        useNative: "以原生方式运行", buildNow: "立即构建", buildBackground: "在后台构建", auto: "自动",
        weightsFixed: "内置", weightsAny: "可替换", anyWeights: "任意 LoRA",
        row_control_net: "ControlNet {number}", row_image: "图像 {number}", row_strength: "强度 {number}",
        row_start: "起点 {number}", row_end: "终点 {number}",
        faster: "在此 GPU 上速度是原生的 {times} 倍", slower: "在此 GPU 上比原生慢（{times} 倍）",
        refit: "更换权重（LoRA、模型）最多需 {time}",
        checked: "与原生一致（已检验）", checkedHint: "构建时与原生的最大差异：最大值的 {error}。",
        readyNext: "就绪，从下一次运行起使用", buildUnwired: "连接模型后才能构建",
        sizesWrong: "{low} {above} 大于{high} {below}。", sizeKept: "{name}仍为 {value}。",
        noMatch: "没有符合筛选条件的引擎。", begin1: "点击“加速此工作流”，或打开一个模板。",
        begin2: "连接你的模型。", begin3: "点击节点上的“构建引擎”，或直接运行。", beginTemplates: "打开模板", builds: "构建任务", engines: "引擎",
        use: "{count} 个引擎，{size}；剩余 {free}", delete: "删除", verify: "校验", rowDetails: "详情…", deleteEngine: "删除…",
        deleteOne: "删除引擎？", deleteMany: "删除 {count} 个引擎？", deleteSelected: "删除所选…",
        deleteOneText: "{name}，{profile}（{size}）。重新构建之前，模型以原生方式运行。",
        deleteManyText: "将释放 {size}。重新构建之前，它们的模型以原生方式运行。",
        deleteDamagedText: "{name}（{size}）已损坏，无法使用。",
        select: "选择 {name}", selectAll: "全选所列引擎", selected: "已选 {count} 个，{size}", menuOf: "{name} 的更多操作",
        sort: "排序方式", sortName: "名称", sortDate: "最新", sortSize: "最大", sortUsed: "最近使用",
        groupOf: "{count} · {size}", damagedGroup: "已损坏", damagedRow: "已损坏，请删除",
        damagedDetails: "此引擎无法读取，不会被使用。请删除，并在需要处重新构建。",
        builtIn: "构建于 {date}，用时 {time}", builtOn: "构建于 {date}", clearFinished: "清除已结束", buildsBefore: "前面还有 {count} 个",
        lastUsed: "上次使用 {date}", usedOn: "{date} 用过", neverUsed: "尚未使用",
        deletedMany: "已删除 {count} 个引擎，{size}",
        uncheckedHint: "此引擎构建时没有使用此 GPU。请点击“检查引擎”：与原生比较之后才会使用。",
        check: "检查引擎",
        verified: "{name} 与构建时一致。", damaged: "{name} 已损坏：{text}。请重新构建。",
        deleted: "{name} 已删除",
        failedAction: "操作未成功", error: "误差 {error}", broken: "已损坏", done: "完成",
        stateCancelled: "已取消", running: "运行中", unet: "UNet", controlnet: "ControlNet",
        notRun: "运行一次后，此节点会说明由谁运行。", noRunYet: "尚未运行", noCalls: "没有调用",
        allOnEngines: "全部在引擎上", someNative: "有原生调用", details: "详情",
        limit: "所有引擎的总大小上限（GB）",
        limitHint: "0 表示不限制。超出上限的构建会被拒绝；不会自动删除任何引擎。",
        limitKept: "已保存；从下一次构建起生效。",
        minutes: "最长构建时间（分钟）",
        minutesHint: "0 表示不限制。超时的构建会被放弃，继续以原生方式运行。",
        level: "TensorRT：优化级别",
        levelHint: "1 构建最快，5 搜索最久；0 由 TensorRT 自行选择。",
        folderHint: "构建写入第一个文件夹。要换文件夹，请在 ComfyUI 的 extra_model_paths.yaml 中写入 trt_engines 并重启；旧文件夹中的引擎仍可使用。",
        presets: "图像尺寸", presetLabel: "尺寸", presetMore: "显示全部设置…", presetLess: "隐藏设置",
        presetHint: "引擎接受哪些图像。“自动”跟随工作流所要求的图像。具体数值在全部设置中。",
        presetOwn: "自定义：{min_size} 到 {max_size} 像素 × {max_images}", sizesCustom: "自定义…",
        sizesAuto: "自动（此工作流：{size}）", sizesAutoFit: "自动（适合模型）",
        presetFitOf: "自动（适合 {family}：{min_size} 到 {max_size} 像素）",
        presetSdxl: "SDXL，所有常用尺寸", presetSd15: "SD 1.5，所有常用尺寸", sizesToAll: "应用到所有引擎节点",
    },
};

let language = "en";

/** Choose the language by ComfyUI's locale, for example "zh-TW". */
export function setLanguage(locale) {
    const start = String(locale ?? "").split("-")[0];
    language = start in TEXTS ? start : "en";
}

/** Whether the page speaks Chinese. */
export function speaksChinese() {
    return language === "zh";
}

/**
 * A text in the page's language.
 * @param {string} key
 * @param {Record<string, unknown>} [values] for the {names} in it
 */
export function t(key, values = {}) {
    return filled(TEXTS[language][key] ?? TEXTS.en[key] ?? key, values);
}

/** A text in every language. */
export function everywhere(key, values = {}) {
    return Object.values(TEXTS).map((texts) => filled(texts[key] ?? key, values));
}

function filled(text, values) {
    return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** The keys of every language; for the tests. */
export function keys() {
    return Object.fromEntries(Object.entries(TEXTS).map(([name, texts]) => [name, Object.keys(texts)]));
}
