// One worker: how it is in words, and the dialog with all that is known of it and what can be done with it.

import { call } from "./api.js";
import { act, confirmed } from "./dialogs.js";
import { byId, compact, count, h, milliseconds, percent, setText } from "./dom.js";

/** {level: good, idle, warn, bad; word; text: the reason in words}. */
export function condition(worker) {
  if (!worker.healthy) return { level: "bad", word: "unwell", text: worker.reason || "unhealthy" };
  if (worker.trust.alarm) return { level: "bad", word: "silent", text: "answers requests, but nothing comes from its event stream" };
  if (worker.draining) return { level: "idle", word: "draining", text: `draining, ${count(worker.inflight)} requests left` };
  if (worker.parity === "failed") return { level: "warn", word: "parity", text: worker.parity_reason || "tokenizes other than we do" };
  if (worker.trust.followed && worker.trust.level !== "exact") {
    const doubts = worker.trust.doubts.map(({ reason }) => reason).join("; ");
    return { level: "warn", word: "doubted", text: doubts || `its events are believed as ${worker.trust.level} only` };
  }
  return { level: "good", word: worker.inflight ? "busy" : "well", text: "takes requests" };
}

/** Share of its KV memory that cached blocks take; null where its size is not told. */
export function kvFill(worker) {
  if (!worker.kv_tokens) return null;
  return worker.cached_tokens ? Math.min(worker.cached_tokens.l0 / worker.kv_tokens, 1) : worker.kv_fill;
}

const encoded = (name) => encodeURIComponent(name);
let store = null;
let shown = null;
let body = null;

export function wireWorker(of) {
  store = of;
  const dialog = byId("worker-dialog");
  dialog.addEventListener("close", () => (shown = null));
  // A click beside it closes it, as Escape does.
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return () => shown && fill();
}

export function openWorker(name) {
  const dialog = byId("worker-dialog");
  shown = name;
  body = h("div", {});
  const close = h("button", { type: "button", class: "push", "aria-label": "Close", onclick: () => dialog.close() }, "×");
  dialog.replaceChildren(h("div", { class: "head" }, h("h2", { id: "worker-title" }, name), close), body, buttons(name));
  fill();
  dialog.showModal();
}

function buttons(name) {
  const path = `/admin/workers/${encoded(name)}`;
  const drain = h("button", { type: "button", id: "worker-drain" }, "Drain");
  const warm = h("button", { type: "button", id: "worker-warm" }, "Warm");
  const pin = h("button", { type: "button", id: "worker-pin" }, "Pin to it");
  drain.addEventListener("click", async () => {
    const back = store.workers.get(name)?.draining;
    const text = back ? "It is sent new requests again." : "It is sent no new requests; what it is serving goes on.";
    if (!(await confirmed(`${back ? "Undrain" : "Drain"} ${name}?`, text, back ? "Undrain" : "Drain"))) return;
    await act(drain, name, async () => {
      const { draining, inflight, gateways } = await call("POST", `${path}/${back ? "undrain" : "drain"}`);
      return draining ? `${name} drains, for ${gateways} gateways; ${count(inflight)} requests left` : `${name} takes requests again`;
    });
  });
  warm.addEventListener("click", async () => {
    const text = "It computes, or pulls, the hottest prefixes that it lacks: up to eight, a minute at most.";
    if (!(await confirmed(`Warm ${name}?`, text, "Warm"))) return;
    await act(warm, name, async () => {
      const { warmed } = await call("POST", `${path}/warm`, {});
      return `${name}: ${Array.isArray(warmed) ? count(warmed.length) : warmed} prefixes warmed`;
    });
  });
  pin.addEventListener("click", () => {
    byId("worker-dialog").close();
    byId("pin-worker").value = name;
    byId("pin-value").focus();
  });
  return h("p", { class: "actions" }, pin, warm, drain);
}

function fill() {
  const worker = store.workers.get(shown);
  if (!worker) {
    body.replaceChildren(h("p", { class: "empty" }, "It has left the fleet."));
    return;
  }
  setText(byId("worker-drain"), worker.draining ? "Undrain" : "Drain");
  const { level, word, text } = condition(worker);
  const rows = facts(worker).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  const state = h("p", { class: "state", "data-level": level }, h("b", {}, word), ` ${text}`);
  const doubts = worker.trust.doubts.map(({ doubt, reason }) => h("li", {}, `${doubt}: ${reason}`));
  const lacks = worker.lacks.map((lack) => h("li", {}, Object.values(lack).filter(Boolean).join("; ")));
  body.replaceChildren(
    state,
    h("dl", { class: "rows" }, ...rows),
    ...section("Doubts about its events", doubts),
    ...section("What its engine was started without", lacks),
  );
}

const section = (title, items) => (items.length ? [h("h3", {}, title), h("ul", {}, ...items)] : []);

function facts(worker) {
  const capacity = worker.capacity_requests ? ` of ${count(worker.capacity_requests)}` : "";
  const cached = worker.cached_tokens;
  const rows = [
    ["Address", worker.url],
    ["Engine", `${worker.engine} ${worker.engine_version}`],
    ["Role", `${worker.role}, ${count(worker.ranks)} ${worker.ranks === 1 ? "rank" : "ranks"}`],
    ["Models", worker.models.join(", ") || "–"],
    ["Requests", `${count(worker.inflight)}${capacity} in flight, ${count(worker.waiting)} without a first token`],
    ["Backlog", `${milliseconds(worker.outstanding_prefill_ms)} of prefill`],
    ["Served", `${count(worker.requests)}, ${count(worker.failures)} failed`],
    ["KV memory", worker.kv_tokens ? `${percent(kvFill(worker))} of ${compact(worker.kv_tokens)} tokens` : "not told"],
    ["Trust", worker.trust.followed ? worker.trust.level : "it publishes no events"],
    ["Token ids", `${worker.parity}${worker.parity_reason ? `: ${worker.parity_reason}` : ""}`],
    ["Moves KV", worker.transfer ? (worker.transfer.problem ?? worker.transfer.codecs.join(", ")) : "no"],
  ];
  if (cached) rows.splice(8, 0, ["Cached", `${compact(cached.l0)} tokens in L0, ${compact(cached.l1)} in L1`]);
  return rows;
}
