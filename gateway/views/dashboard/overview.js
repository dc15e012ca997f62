// The first look: what is wrong, the numbers of now, and how the last minutes went.

import { Chart } from "./charts.js";
import { byId, bytes, compact, count, duration, h, keyed, milliseconds, percent, rate, setAttribute, setText } from "./dom.js";
import { condition, openWorker } from "./worker.js";

const SHOWN_MAX = 6;

const CHARTS = [
  new Chart({
    title: "Prompt tokens found, by tier",
    stacked: true,
    most: 1,
    format: (value) => percent(value),
    series: [
      { name: "L0", className: "l0", field: "hit_l0" },
      { name: "L1", className: "l1", field: "hit_l1" },
      { name: "pool", className: "l2", field: "hit_l2" },
      { name: "pulled", className: "pulled", field: "hit_pulled" },
      { name: "guessed", className: "guessed", field: "hit_guessed" },
    ],
  }),
  new Chart({
    title: "Time to first token",
    format: milliseconds,
    series: [
      { name: "p50", className: "p50", field: "ttft_ms_p50" },
      { name: "p90", className: "p90", field: "ttft_ms_p90" },
      { name: "p99", className: "p99", field: "ttft_ms_p99" },
    ],
  }),
  new Chart({
    title: "Requests a second",
    format: rate,
    series: [
      { name: "all", className: "l0", field: "requests_per_second" },
      { name: "failed", className: "bad", field: "errors_per_second" },
      { name: "refused", className: "warn", field: "refused_per_second" },
    ],
  }),
  new Chart({
    title: "KV moved and prefill saved, a second",
    none: "No KV has moved",
    format: (value) => rate(value),
    series: [
      { name: "MB moved", className: "pulled", field: "pulled_bytes_per_second", scale: 1e-6 },
      { name: "ms saved", className: "good", field: "saved_ms_per_second" },
    ],
  }),
];

const NUMBERS = [
  ["Requests a second", (store) => show(store.last("requests_per_second"), rate), (store) => `${count(store.status.requests.total)} in all`],
  ["In flight", (store) => count(store.status.requests.inflight), (store) => `${count(waiting(store))} wait`],
  ["Tokens found", (store) => percent(share(store)), (store) => `${compact(store.status.tokens.matched)} of ${compact(store.status.tokens.prompt)}`],
  ["First token, p50", (store) => milliseconds(store.status.ttft_ms.p50), (store) => `p90 ${milliseconds(store.status.ttft_ms.p90)}`],
  ["First token, p99", (store) => milliseconds(store.status.ttft_ms.p99), (store) => `of ${store.status.ttft_ms.count} in a minute`],
  ["Failed", (store) => count(store.status.requests.errors), (store) => `${count(store.status.requests.refused)} refused, ${count(store.status.requests.retries)} retries`],
  ["KV moved", (store) => bytes(store.status.transfers?.moved?.pulled_bytes ?? 0), (store) => `${duration(store.status.transfers?.moved?.saved_seconds ?? 0)} of prefill saved`],
  ["Blocks known", (store) => compact(store.status.index.blocks), (store) => `at ${count(store.status.index.holders)} holders`],
];

const show = (value, format) => (value === null ? "–" : format(value));
const share = ({ status: { tokens } }) => (tokens.prompt ? tokens.matched / tokens.prompt : null);
const waiting = (store) =>
  store.fleet.reduce((sum, worker) => sum + worker.waiting, 0) + (store.status.admission?.waiting ?? 0);

export function wireOverview(store) {
  byId("charts").append(...CHARTS.map((chart) => chart.element));
  const boxes = NUMBERS.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}, "–"), h("dd", { class: "note" })));
  byId("numbers").append(...boxes);
  const lines = new Map();
  return (changed) => {
    NUMBERS.forEach(([, value, note], index) => {
      const [, first, second] = boxes[index].children;
      setText(first, value(store));
      setText(second, note(store));
    });
    setText(byId("fact-policy"), store.status.policy);
    setText(byId("fact-version"), store.status.version);
    setText(byId("fact-uptime"), `up ${duration(Date.now() / 1000 - store.status.started_at)}`);
    if (changed.has("samples")) CHARTS.forEach((chart) => chart.update(store));
    showAttention(store, lines);
  };
}

/** What an operator should look at, worst first; one line that all is well otherwise. */
function showAttention(store, lines) {
  const found = [...gatewayTrouble(store), ...workerTrouble(store)];
  found.sort((one, other) => (one.level === "bad" ? 0 : 1) - (other.level === "bad" ? 0 : 1));
  const shown = found.slice(0, SHOWN_MAX);
  if (found.length > SHOWN_MAX) shown.push({ key: "more", level: "warn", text: `and ${found.length - SHOWN_MAX} more; see the fleet below` });
  if (!found.length) shown.push({ key: "well", level: "good", text: "All is well." });
  keyed(byId("attention"), lines, shown, (line) => line.key, createLine, (element, line) => {
    setAttribute(element, "data-level", line.level);
    setText(element.firstElementChild, line.text);
  });
}

function createLine(line) {
  const text = h(line.worker ? "button" : "span", line.worker ? { type: "button", onclick: () => openWorker(line.worker) } : {});
  return h("li", {}, text);
}

function gatewayTrouble({ status, fleet }) {
  const found = [];
  if (!status.ready) found.push({ key: "ready", level: "bad", text: fleet.length ? "No worker takes requests." : "No worker is registered." });
  if (status.sharing && !status.sharing.server.up) found.push({ key: "store", level: "bad", text: "The shared index does not answer." });
  if (status.admission?.waiting) found.push({ key: "waiting", level: "warn", text: `${count(status.admission.waiting)} requests wait at the gateway: no worker has room.` });
  return found;
}

function workerTrouble({ fleet }) {
  const sick = fleet.map((worker) => ({ worker, ...condition(worker) })).filter(({ level }) => level === "bad" || level === "warn");
  return sick.map(({ worker, level, text }) => ({
    key: `worker ${worker.name}`,
    level,
    worker: worker.name,
    text: `${worker.name}: ${text}`,
  }));
}
