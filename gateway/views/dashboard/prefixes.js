// What the last prompts share, as the radix tree that it is, and who holds it.

import { byId, compact, count, h, isHeld } from "./dom.js";

export function wirePrefixes(store) {
  const box = byId("prefix-tree");
  let shown = "";
  return (changed) => {
    if (!changed.has("prefixes") || isHeld(box)) return;
    const roots = store.status.prefixes ?? [];
    const now = JSON.stringify(roots);
    if (now === shown) return;
    shown = now;
    byId("prefixes-empty").hidden = roots.length > 0;
    box.hidden = !roots.length;
    const most = Math.max(1, ...roots.map((root) => root.requests));
    box.replaceChildren(h("ul", { class: "tree" }, ...roots.map((root) => node(root, most))));
  };
}

function node(prefix, most) {
  const meter = h("span", { class: "meter l0", "aria-hidden": "true" }, h("i", {}));
  meter.firstElementChild.style.width = `${(prefix.requests / most) * 100}%`;
  const pin = h("button", { type: "button", "aria-label": `Pin prefix ${prefix.name.slice(0, 8)}`, onclick: () => beginPin(prefix.name) }, "Pin");
  const row = h(
    "div",
    { class: "prefix" },
    h("span", { class: "line" }, meter, h("b", {}, `${count(prefix.tokens)} tokens`), h("span", { class: "note" }, `${count(prefix.requests)} prompts`), h("code", { title: prefix.name }, prefix.name.slice(0, 8)), pin),
    h("span", { class: "note" }, holders(prefix)),
  );
  const children = prefix.children.length ? h("ul", {}, ...prefix.children.map((child) => node(child, most))) : null;
  return h("li", {}, row, children);
}

function holders(prefix) {
  const of = `${prefix.model}${prefix.tenant ? `, ${prefix.tenant}` : ""}; `;
  if (prefix.holders === null) return `${of}holders are known to the index server alone`;
  if (!prefix.holders.count) return `${of}held by nobody`;
  const { shown, whole, count: all } = prefix.holders;
  const named = shown.filter(({ tokens }) => tokens === prefix.tokens).map(({ holder, tier }) => `${holder} (${tier.toUpperCase()})`);
  const more = whole > named.length ? ` and ${count(whole - named.length)} more` : "";
  const part = all > whole ? `${whole ? "; " : ""}${count(all - whole)} hold part of it, up to ${compact(Math.max(...shown.map(partOf(prefix))))} tokens` : "";
  return `${of}${whole ? `held by ${named.join(", ")}${more}` : ""}${part}`;
}

const partOf = (prefix) => ({ tokens }) => (tokens < prefix.tokens ? tokens : 0);

function beginPin(name) {
  byId("pin-kind").value = "prefix";
  byId("pin-value").value = name;
  byId("pin-worker").focus();
  byId("steering").scrollIntoView();
}
