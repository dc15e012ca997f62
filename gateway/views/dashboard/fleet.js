// The fleet as a map of tiles: name, state, load, and KV in each tier.

import { byId, compact, count, h, keyed, percent, setAttribute, setText } from "./dom.js";
import { condition, kvFill, openWorker } from "./worker.js";

const DENSE_FROM = 40;
const collator = new Intl.Collator("en", { numeric: true });

export function wireFleet(store) {
  const tiles = new Map();
  const show = () => showFleet(store, tiles);
  byId("fleet-find").addEventListener("input", show);
  byId("fleet-show").addEventListener("change", show);
  return (changed) => changed.has("workers") && show();
}

function showFleet(store, tiles) {
  const all = store.fleet;
  const wanted = byId("fleet-find").value.trim().toLowerCase();
  const which = byId("fleet-show").value;
  const shown = all
    .map((worker) => ({ worker, ...condition(worker) }))
    .filter(({ worker, level }) => {
      if (wanted && !worker.name.toLowerCase().includes(wanted)) return false;
      return which === "all" || (which === "busy" ? worker.inflight > 0 : level === "bad" || level === "warn");
    })
    .sort((one, other) => collator.compare(one.worker.name, other.worker.name));
  const hostMost = Math.max(1, ...all.map((worker) => worker.cached_tokens?.l1 ?? 0));
  keyed(byId("tiles"), tiles, shown, ({ worker }) => worker.name, create, (tile, entry) => update(tile, entry, hostMost));
  const empty = byId("fleet-empty");
  empty.hidden = shown.length > 0;
  setText(empty, all.length ? "No worker is like that." : "No worker is registered. Start one, or POST /admin/workers.");
  byId("tiles").hidden = !shown.length;
  byId("tiles").classList.toggle("dense", shown.length > DENSE_FROM);
  const well = all.filter((worker) => worker.healthy).length;
  const draining = all.filter((worker) => worker.draining).length;
  const pools = Object.entries(store.status.transfers?.pools ?? {}).map(([name, runs]) => `; pool ${name}: ${count(runs)} runs (L2)`);
  setText(byId("fleet-summary"), `${count(well)} of ${count(all.length)} healthy${draining ? `, ${count(draining)} draining` : ""}${pools.join("")}`);
}

function create({ worker }) {
  const bar = (kind) => h("span", { class: `meter ${kind}` }, h("i", {}));
  const top = h("span", { class: "top" }, h("span", { class: "name" }), h("span", { class: "load" }));
  const bars = h("span", { class: "bars", "aria-hidden": "true" }, bar("load"), bar("l0"), bar("l1"));
  const button = h("button", { type: "button", class: "tile", onclick: () => openWorker(worker.name) }, top, bars, h("span", { class: "word" }));
  return h("li", {}, button);
}

function update(item, { worker, level, word, text }, hostMost) {
  const button = item.firstElementChild;
  const [top, bars, state] = button.children;
  const capacity = worker.capacity_requests;
  const load = capacity ? `${worker.inflight}/${capacity}` : `${worker.inflight}`;
  const host = worker.cached_tokens?.l1 ?? 0;
  const fill = kvFill(worker) ?? 0;
  setAttribute(button, "data-level", level);
  setText(top.firstElementChild, worker.name);
  setText(top.lastElementChild, load);
  setText(state, worker.healthy && level !== "bad" ? `${word}${worker.role === "both" || !worker.role ? "" : `, ${worker.role}`}` : word);
  // Of the engine's slots; where nobody knows how many, half full at eight.
  width(bars.children[0], capacity ? worker.inflight / capacity : worker.inflight / (worker.inflight + 8));
  width(bars.children[1], fill);
  width(bars.children[2], host / hostMost);
  const kv = worker.kv_tokens ? `KV memory ${percent(fill)} full` : "KV memory not told";
  const tiers = worker.cached_tokens ? `, ${compact(worker.cached_tokens.l0)} tokens in L0, ${compact(host)} in L1` : "";
  setAttribute(button, "aria-label", `${worker.name}, ${word}: ${text}. ${worker.inflight} in flight. ${kv}${tiers}`);
  setAttribute(button, "title", `${worker.name}: ${text}`);
}

function width(meter, share) {
  const value = `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(1)}%`;
  if (meter.firstElementChild.style.width !== value) meter.firstElementChild.style.width = value;
}
