// The panel's list of engines: a section per model, two lines per engine with a box to select it and a menu.

import { arrange, make } from "./dom.mjs";
import { openMenu } from "./menu.mjs";
import { engineRow, shortName, tone } from "./panel_words.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

export class EngineRows {
    /**
     * @param {{select: (name: string, on: boolean) => void, entries: (engine: any) => {label: string, act: () => void}[]}} actions
     */
    constructor(actions) {
        this.actions = actions;
        this.element = make("div", "hybrid-trt-panel-engines");
        this.rows = new Map(); // name -> its row, kept while the engine says the same
        this.sections = new Map(); // label -> the section of a model
    }

    /**
     * @param {import("./panel_words.mjs").Group[]} groups
     * @param {Set<string>} selected names
     * @param {string} order how the list is sorted
     */
    draw(groups, selected, order) {
        this.order = order;
        const before = this.rows, sections = this.sections;
        this.rows = new Map();
        this.sections = new Map(groups.map(({ label }) => [label, sections.get(label) ?? section(label)]));
        arrange(this.element, groups.map((group) => this.#section(group, selected, before)));
    }

    #section({ label, engines, bytes }, selected, before) {
        const { element, head, count } = this.sections.get(label);
        count.textContent = engines.length > 1 ? t("groupOf", { count: engines.length, size: size(bytes) }) : "";
        arrange(element, [head, ...engines.map((engine) => this.#row(engine, selected.has(engine.name), before))]);
        return element;
    }

    #row(engine, on, before) {
        const says = JSON.stringify([engine, this.order]), old = before.get(engine.name);
        const row = old?.says === says ? old : { says, ...this.#make(engine) };
        row.box.checked = on;
        this.rows.set(engine.name, row);
        return row.card;
    }

    #make(engine) {
        const words = engineRow(engine, this.order), name = [engine.label, words.title].filter(Boolean).join(", ");
        const card = make("div", "hybrid-trt-card hybrid-trt-engine");
        card.dataset.tone = tone(engine.state);
        card.dataset.engine = engine.name;
        card.title = words.details.join("\n");
        const box = make("input");
        box.type = "checkbox";
        box.setAttribute("aria-label", t("select", { name }));
        box.addEventListener("change", () => this.actions.select(engine.name, box.checked));
        const text = make("div", "hybrid-trt-two-lines");
        text.append(make("strong", "", words.title), make("div", "hybrid-trt-quiet", words.meta));
        const menu = make("button", "hybrid-trt-more", "⋯");
        menu.type = "button";
        menu.setAttribute("aria-label", t("menuOf", { name }));
        menu.setAttribute("aria-haspopup", "menu");
        menu.setAttribute("aria-expanded", "false");
        menu.addEventListener("click", () => openMenu(menu, this.actions.entries(engine)));
        card.append(box, text, menu);
        return { card, box };
    }
}

function section(label) {
    const element = make("section", "hybrid-trt-group"), head = make("h5", "");
    element.setAttribute("aria-label", label);
    const name = make("span", "hybrid-trt-group-name", shortName(label)), count = make("span", "hybrid-trt-quiet");
    name.title = label;
    head.append(name, count);
    return { element, head, count };
}
