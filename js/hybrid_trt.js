// The pack's part of the page: the button and the status on engine nodes, kept true by the server's events.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { changeAcceleration } from "./lib/accelerate.mjs";
import { giveMark, titlesOfHolders } from "./lib/badges.mjs";
import { Builder, runError } from "./lib/build.mjs";
import { showText } from "./lib/dialog.mjs";
import { labelValues } from "./lib/labels.mjs";
import { logLines } from "./lib/words.mjs";
import { NodeView } from "./lib/node_view.mjs";
import { Live } from "./lib/live.mjs";
import { COMPARE, ENGINE_NODES, REPORT } from "./lib/node_names.mjs";
import { inChinese, titlesInChinese } from "./lib/notes_zh.mjs";
import { Panel } from "./lib/panel.mjs";
import { PictureSizes } from "./lib/picture_sizes.mjs";
import { follow, offer, sizesOf } from "./lib/presets.mjs";
import { keepOrder, orderWords } from "./lib/size_order.mjs";
import { request } from "./lib/server.mjs";
import { said } from "./lib/server_zh.mjs";
import { defaultsFor, librarySettings, settings } from "./lib/settings.mjs";
import { inSight, openReadable } from "./lib/template_view.mjs";
import { TabTitle } from "./lib/tab_title.mjs";
import { setLanguage, speaksChinese, t } from "./lib/texts.mjs";
import { showComparison, showKept, showRuns, TEXT_NODES } from "./lib/text_view.mjs";
import { Tracker } from "./lib/tracker.mjs";
import { WorkflowView } from "./lib/workflow_view.mjs";

/** Title and body; what a workflow was saved with wins. */
const COLOURS = {
    TRTAccelerate: ["#2c4a3e", "#23332c"], TRTUNetEngine: ["#2c4a3e", "#23332c"],
    TRTControlNetEngine: ["#2c4a3e", "#23332c"], TRTVAEEngine: ["#2c4a3e", "#23332c"],
    TRTApplyControlNet: ["#4a3d24", "#332c20"], TRTSamplerPatch: ["#3b2c4a", "#2b2333"], TRTReport: ["#3b2c4a", "#2b2333"],
    TRTCompare: ["#3b2c4a", "#2b2333"], TRTStream: ["#3b2c4a", "#2b2333"],
};
const DAY = 86400000;
const toast = (severity, summary, detail, stays = false) =>
    app.extensionManager.toast.add({ severity, summary, detail, life: stays ? DAY : severity === "error" ? 20000 : 8000 });
const SIDEBAR = "hybrid_trt.engines";
const tracker = new Tracker(app, api);
const followed = new Map(); // what Auto's sizes are on the nodes of open workflows
const builder = new Builder(tracker, toast, (node) => inSight(app.canvas, node));
const tabTitle = new TabTitle(document);
const panel = new Panel(api, {
    toast, showLog, rebuild: (engine) => builder.rebuild(engine),
    accelerate: () => accelerateWorkflow(), offers: () => !tracker.present.length,
    asked: () => tracker.present.filter(({ state }) => state.state === "asked").map(({ node }) => node.title ?? node.type),
    templates: () => app.extensionManager.command.execute("Comfy.BrowseTemplates"),
});

tracker.watchers.add(() => panel.waiting());

async function showLog(job) {
    try {
        const { label, message, log } = await request(api, `/builds/${job}`);
        showText(t("logOf", { label }), logLines(log, message));
    } catch (failure) {
        toast("error", "TRT", failure.message);
    }
}

/** What the open workflow lacks, with one button that builds it all. */
function workflowView(more = {}) {
    return new WorkflowView(tracker, {
        buildAll: () => builder.buildAll(), cancelAll: (views) => builder.cancelAll(views), ...more,
    });
}

function jump(node) {
    if (app.canvas.graph !== node.graph) app.canvas.setGraph?.(node.graph);
    app.canvas.selectNode(node);
    app.canvas.centerOnNode(node);
}

/** Change the workflow, and show the panel with its button for all engines. */
async function accelerateWorkflow() {
    const count = await changed("add", t("accelerate"));
    if (count === 0) toast("info", t("accelerate"), t("accelerateNothing"));
    if (!count) return;
    await tracker.settle(); // the panel that opens below shows the new nodes
    const names = titlesOfHolders(tracker.root()).join(", ");
    toast("success", t("accelerate"), t("accelerateDone", { where: names && t("accelerateInside", { names }) }));
    const { sidebarTab } = app.extensionManager;
    if (sidebarTab.activeSidebarTabId !== SIDEBAR) sidebarTab.toggleSidebarTab(SIDEBAR);
}

async function removeFromWorkflow() {
    const count = await changed("remove", t("accelerateRemove"));
    if (count !== null) toast("info", t("accelerateRemove"), t(count ? "accelerateRemoved" : "accelerateNone", { count }));
}

/** The number of nodes that were added or taken out; null where the server refuses, or another workflow is open now. */
async function changed(what, title) {
    try {
        const done = await changeAcceleration(app, api, what);
        if (done?.left) toast("warn", title, said(done.left));
        return done && done.count;
    } catch (failure) {
        toast("error", title, failure.message);
        return null;
    }
}

/** Whether a node's menu offers acceleration: loaders and samplers. */
const leadsTo = (node) => [...(node.inputs ?? []), ...(node.outputs ?? [])].some(({ type }) => type === "MODEL");
const accelerateEntries = () => [
    { content: t("accelerate"), callback: accelerateWorkflow }, { content: t("accelerateRemove"), callback: removeFromWorkflow },
];

let sidebar = null;

function openSidebar(element) {
    closeSidebar();
    sidebar = workflowView({ jump });
    const engines = document.createElement("div");
    element.classList.add("hybrid-trt-sidebar");
    element.replaceChildren(sidebar.element, engines);
    panel.open(engines);
}

function closeSidebar() {
    sidebar?.close();
    sidebar = null;
    panel.close();
}

function showRunsOf(node) {
    if (node.comfyClass === COMPARE) return showComparison(node);
    if (node.comfyClass !== REPORT) return showRuns(node);
    const view = workflowView();
    follow(node, "onRemoved", () => view.close());
    // the page finds the type of the first output a moment after it made the node: saved, that would be one more edit to undo
    follow(node, "onSerialize", ({ outputs }) => { if (outputs?.[0]) outputs[0].type = "*"; });
    showRuns(node, [view.element]);
}

/** Give a node's choice of sizes to all engine nodes of its sampler. */
function toAll(sizes) {
    const { choice } = sizes, samplersOf = ({ state }) => state.sizes?.samplers ?? [];
    const numbers = choice === "custom" ? sizesOf(sizes.node) : undefined, mine = samplersOf(tracker.views.get(sizes.node));
    for (const view of tracker.present)
        if (view.node !== sizes.node && samplersOf(view).some((sampler) => mine.includes(sampler))) view.actions.sizes.choose(choice, numbers);
}

/** What a click on a node's button does; for sizes that cannot be built it says so instead. */
function press(view) {
    const wrong = view.busy ? "" : orderWords(view.node);
    view.say(wrong);
    if (!wrong && !view.button.disabled) builder.press(view);
}

let wasCut = false; // from the server, since builds were looked for last

/** Tell of builds that a restart lost, once the page is seen. */
function lookForLost() {
    if (!wasCut || document.hidden) return;
    wasCut = false;
    builder.reconnected().catch(() => {}); // the page itself says that the server is away
}

function hearServer() {
    api.addEventListener("hybrid_trt.build", ({ detail }) => {
        tabTitle.hear(detail);
        builder.hear(detail);
    });
    api.addEventListener("reconnected", () => {
        wasCut = true;
        lookForLost();
    });
    api.addEventListener("execution_success", ({ detail }) => builder.promptEnded(detail.prompt_id));
    api.addEventListener("execution_interrupted", ({ detail }) => builder.promptEnded(detail.prompt_id));
    api.addEventListener("execution_error", ({ detail }) =>
        builder.promptEnded(detail.prompt_id, runError(detail)));
    for (const event of ["hybrid_trt.library", "status", "reconnected"]) api.addEventListener(event, () => tracker.soon());
    api.addEventListener("graphChanged", () => tracker.changed());
    document.addEventListener("visibilitychange", () => {
        tracker.shown();
        tabTitle.shown();
        lookForLost();
    });
    const queue = api.queuePrompt;
    api.queuePrompt = function (number, prompt, ...more) {
        try {
            tracker.queued(prompt.output);
        } catch (failure) {
            console.warn("Hybrid TRT:", failure); // nothing of ours may keep a prompt from being queued
        }
        return queue.call(this, number, prompt, ...more);
    };
}

const warn = (failure) => console.warn("Hybrid TRT:", failure.message); // Auto is offered without
const [backends] = await Promise.all([
    request(api, "/settings").then((answer) => answer.backends, warn),
    request(api, "/presets").then(offer, warn),
]);

app.registerExtension({
    name: "hybrid_trt.page",
    commands: [
        { id: "HybridTRT.Accelerate", label: t("accelerate"), icon: "pi pi-bolt", function: accelerateWorkflow },
        { id: "HybridTRT.RemoveAcceleration", label: t("accelerateRemove"), icon: "pi pi-times", function: removeFromWorkflow },
    ],
    menuCommands: [{ path: ["Hybrid TRT"], commands: ["HybridTRT.Accelerate", "HybridTRT.RemoveAcceleration"] }],
    getCanvasMenuItems: accelerateEntries,
    settings: [...settings(backends ?? ["auto"]), ...librarySettings(api)],
    setup() {
        for (const file of ["./style.css", "./panel.css"]) {
            const style = Object.assign(document.createElement("link"), { rel: "stylesheet" });
            style.href = new URL(file, import.meta.url).href;
            document.head.append(style);
        }
        setLanguage(app.extensionManager.setting.get("Comfy.Locale"));
        hearServer();
        app.extensionManager.registerSidebarTab({
            id: SIDEBAR, icon: "pi pi-bolt", title: t("panel"), tooltip: t("panel"), type: "custom",
            render: openSidebar, destroy: closeSidebar,
        });
        const live = new Live(api, { prompt: async () => (await app.graphToPrompt()).output, queue: () => app.queuePrompt(0) });
        app.extensionManager.registerSidebarTab({
            id: "hybrid_trt.live", icon: "pi pi-video", title: t("live"), tooltip: t("live"), type: "custom", render: (element) => live.open(element),
        });
    },
    nodeCreated(node) {
        if (node.isSubgraphNode?.()) giveMark(node);
        if (node.comfyClass in COLOURS) [node.color, node.bgcolor] = COLOURS[node.comfyClass];
        if (TEXT_NODES.includes(node.comfyClass)) showRunsOf(node);
        if (!ENGINE_NODES.includes(node.comfyClass)) return;
        labelValues(node);
        defaultsFor(node, (id) => app.extensionManager.setting.get(id));
        const sizes = new PictureSizes(node, () => tracker.changed(), toAll, followed);
        tracker.views.set(node, new NodeView(node, {
            press, buildFor: (view) => builder.buildFor(view), showLog, sizes,
        }));
        keepOrder(node, (words) => tracker.views.get(node)?.say(words));
        node.setSize([node.size[0], node.computeSize()[1]]); // it was made with the rows that are folded now
        follow(node, "onConnectionsChange", () => tracker.changed());
        tracker.changed();
    },
    getNodeMenuItems(node) {
        if (ENGINE_NODES.includes(node.comfyClass)) return [tracker.views.get(node)?.actions.sizes.menu()].filter(Boolean);
        return leadsTo(node) ? accelerateEntries().slice(0, 1) : [];
    },
    onNodeOutputsUpdated(outputs) { // all at once, as after another tab; what one node puts out it hears itself
        showKept(tracker.root(), outputs);
    },
    afterConfigureGraph() {
        panel.opened(tracker.root()?.id);
        tracker.changed();
        openReadable(app, speaksChinese() ? (text) => titlesInChinese(inChinese(text)) : undefined);
    },
});
