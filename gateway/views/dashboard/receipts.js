// Why requests went where they went: the newest receipts, in words, and unfolded in numbers.

import { byId, clockTime, count, h, isHeld, keyed, milliseconds, setText } from "./dom.js";

const SHOWN_MAX = 60;
const WHAT = "why each request went where it went";

export function wireReceipts(store) {
  const items = new Map();
  const pause = byId("receipts-pause");
  let kept = [];
  let paused = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    setText(pause, paused ? "Go on" : "Pause");
    if (!paused) show();
  });
  const show = () => {
    const fresh = store.status.receipts ?? [];
    const known = new Set(fresh.map(keyOf));
    kept = [...fresh, ...kept.filter((receipt) => !known.has(keyOf(receipt)))].slice(0, SHOWN_MAX);
    keyed(byId("receipt-list"), items, kept, keyOf, create, update);
    byId("receipts-empty").hidden = kept.length > 0;
    byId("receipt-list").hidden = !kept.length;
  };
  return (changed) => {
    const held = isHeld(byId("receipt-list"));
    setText(byId("receipts-note"), held ? "held while you are at it" : WHAT);
    if (!changed.has("receipts")) return;
    if (!paused && !held) show();
    else for (const receipt of store.status.receipts) if (items.has(keyOf(receipt))) update(items.get(keyOf(receipt)), receipt);
  };
}

const keyOf = (receipt) => `${receipt.request_id} ${receipt.decided_at}`;

function create(receipt) {
  return h("li", {}, receiptElement(receipt));
}

function update(item, receipt) {
  fillReceipt(item.firstElementChild, receipt);
}

/** A receipt that unfolds: its words, then the candidates. */
export function receiptElement(receipt, open = false) {
  const hit = h("span", { class: "meter l0", "aria-hidden": "true" }, h("i", {}));
  const head = h("span", { class: "line" }, h("time", {}), hit, h("span", { class: "note" }));
  const element = h("details", { class: "receipt", open }, h("summary", {}, head, h("span", { class: "words" })), h("div", {}));
  element.addEventListener("toggle", () => element.open && fillDetails(element, element.receipt));
  fillReceipt(element, receipt);
  return element;
}

export function fillReceipt(element, receipt) {
  const before = element.receipt;
  if (before && before.seen_ttft_ms === receipt.seen_ttft_ms && before.reported_cached_tokens === receipt.reported_cached_tokens) return;
  element.receipt = receipt;
  const [head, words] = element.firstElementChild.children;
  const [time, hit, note] = head.children;
  setText(time, clockTime(receipt.decided_at));
  hit.firstElementChild.style.width = `${Math.min((receipt.matched_tokens / Math.max(receipt.prompt_tokens, 1)) * 100, 100)}%`;
  setText(note, `${receipt.model} · ${receipt.policy} · ${receipt.evidence}`);
  words.replaceChildren(h("b", {}, receipt.worker), receipt.words.slice(receipt.worker.length));
  if (element.open) fillDetails(element, receipt);
}

function fillDetails(element, receipt) {
  const reported = receipt.reported_cached_tokens;
  const facts = [
    ["Request", receipt.request_id],
    ["Tenant", receipt.tenant || "–"],
    ["Predicted", milliseconds(receipt.predicted_ttft_ms)],
    ["Seen", milliseconds(receipt.seen_ttft_ms)],
    ["Confirmed", `${count(receipt.confirmed_tokens)} tokens`],
    ["Engine says", reported === null ? "–" : `${count(reported)} tokens cached`],
    ["Decided in", `${receipt.decision_us.toFixed(0)} µs`],
    ["Trust", receipt.trust],
  ];
  const rows = receipt.candidates.map((candidate, index) =>
    h(
      "tr",
      index ? {} : { class: "chosen" },
      h("th", { scope: "row" }, candidate.worker),
      h("td", {}, count(candidate.matched_tokens)),
      h("td", {}, milliseconds(candidate.wait_ms)),
      h("td", {}, candidate.cost === null ? "–" : candidate.cost.toPrecision(3)),
    ),
  );
  const rest = receipt.candidates_count - receipt.candidates.length;
  const heads = ["Candidate", "Tokens", "Wait", "Cost"].map((name) => h("th", { scope: "col" }, name));
  element.lastElementChild.replaceChildren(
    h("dl", { class: "rows" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
    rest > 0 ? h("p", { class: "note" }, `and ${count(rest)} that would have cost more`) : "",
  );
}
