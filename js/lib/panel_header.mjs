// The panel's head, which stays while the list scrolls: what there is, filter and order, and what can be done with many.

import { button, make } from "./dom.mjs";
import { SORT_KEYS } from "./panel_words.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

export class PanelHeader {
    /**
     * @param {{draw: () => void, refresh: () => void, deleteSelected: () => void, selectShown: (on: boolean) => void}} actions
     */
    constructor(actions) {
        this.use = make("div", "hybrid-trt-quiet");
        this.filter = make("input");
        Object.assign(this.filter, { placeholder: t("filter"), type: "search" });
        this.filter.setAttribute("aria-label", t("filter"));
        this.filter.addEventListener("input", actions.draw);
        this.filter.addEventListener("keydown", (event) => event.stopPropagation());
        this.sort = make("select");
        this.sort.setAttribute("aria-label", t("sort"));
        this.sort.append(...SORT_KEYS.map((key) => Object.assign(make("option", "", t(key)), { value: key })));
        this.sort.addEventListener("change", actions.draw);
        this.find = make("div", "hybrid-trt-row");
        this.find.append(this.filter, this.sort);
        const tools = make("div", "hybrid-trt-row");
        tools.append(button("refresh", actions.refresh));
        this.element = make("header", "hybrid-trt-panel-head");
        this.element.append(make("h3", "", t("panel")), this.use, this.find, tools, this.#selection(actions));
        this.bar.hidden = true; // until it is known what there is
    }

    /**
     * @param {{count: number, bytes: number, free: number, folder: string}} all
     * @param {{count: number, bytes: number, shown: number, shownSelected: number}} chosen
     */
    show(all, chosen) {
        this.use.textContent = t("use", { count: all.count, size: size(all.bytes), free: size(all.free) });
        this.use.title = all.folder;
        this.find.hidden = !all.count;
        this.bar.hidden = !all.count;
        this.all.checked = chosen.shown > 0 && chosen.shownSelected === chosen.shown;
        this.all.indeterminate = chosen.shownSelected > 0 && !this.all.checked;
        this.told.textContent = chosen.count ? t("selected", { count: chosen.count, size: size(chosen.bytes) }) : t("selectAll");
        this.delete.hidden = !chosen.count;
    }

    #selection(actions) {
        this.bar = make("div", "hybrid-trt-row hybrid-trt-selection");
        const label = make("label", "hybrid-trt-row");
        this.all = make("input");
        this.all.type = "checkbox";
        this.all.addEventListener("change", () => actions.selectShown(this.all.checked));
        this.told = make("span", "hybrid-trt-quiet");
        label.append(this.all, this.told);
        this.delete = button("deleteSelected", actions.deleteSelected);
        this.delete.classList.add("hybrid-trt-danger");
        this.bar.append(label, this.delete);
        return this.bar;
    }
}
