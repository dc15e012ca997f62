// What an operator changes: the policy and tenants' shares, after a dry run; pins; and what shadows would have done.

import { ApiError, call } from "./api.js";
import { act, confirmed } from "./dialogs.js";
import { byId, count, h, milliseconds, percent, setText } from "./dom.js";

let store = null;
/** Shares as the gateway last told them: those that nobody has touched here are not sent back to it. */
let known = {};

export function wireSteering(of) {
  store = of;
  byId("policy-form").addEventListener("submit", applyPolicy);
  byId("policy-try").addEventListener("click", tryPolicy);
  byId("weight-add").addEventListener("click", () => byId("weight-rows").append(weightRow("", 1)));
  byId("pin-form").addEventListener("submit", addPin);
  let policy = "";
  let workers = "";
  return (changed) => {
    if (changed.has("policy") && store.status.policy !== policy) {
      policy = store.status.policy;
      loadPolicy();
      loadPins();
    }
    if (changed.has("worker_names") && store.status.worker_names.join() !== workers) {
      workers = store.status.worker_names.join();
      fillSelect(byId("pin-worker"), store.status.worker_names);
    }
    if (changed.has("shadows")) showShadows(store.status.shadows);
  };
}

/** Choices that stay chosen while they are there. */
export function fillSelect(select, values, chosen = select.value) {
  select.replaceChildren(...values.map((value) => h("option", { value }, value)));
  if (values.includes(chosen)) select.value = chosen;
}

// Policy

async function loadPolicy() {
  const told = await quietly(() => call("GET", "/admin/policy"));
  if (told) showPolicy(told);
}

function showPolicy({ policy, policies, weights }) {
  known = weights;
  fillSelect(byId("policy-select"), policies, policy);
  byId("policy-select").disabled = false;
  // Shares mean something only where requests wait at the gateway.
  byId("weights").hidden = !store.status.admission;
  byId("weight-rows").replaceChildren(...Object.entries(weights).map(([tenant, weight]) => weightRow(tenant, weight)));
}

function weightRow(tenant, weight) {
  const name = h("input", { value: tenant, placeholder: "tenant", "aria-label": "Tenant", autocomplete: "off" });
  const share = h("input", { type: "number", value: weight, min: "0.001", max: "1000", step: "any", "aria-label": "Share" });
  const remove = h("button", { type: "button", "aria-label": "Remove the tenant", onclick: () => row.remove() }, "×");
  const row = h("div", { class: "weight" }, name, share, remove);
  return row;
}

function proposal() {
  const asked = { policy: byId("policy-select").value };
  if (byId("weights").hidden) return asked;
  const rows = [...byId("weight-rows").children].map((row) => [...row.querySelectorAll("input")].map((input) => input.value.trim()));
  const weights = Object.fromEntries(rows.filter(([tenant]) => tenant).map(([tenant, share]) => [tenant, Number(share)]));
  return JSON.stringify(weights) === JSON.stringify(known) ? asked : { ...asked, weights };
}

function tryPolicy() {
  return act(byId("policy-try"), "Dry run", async () => {
    const result = await call("PUT", "/admin/policy?dry_run=true", proposal());
    byId("policy-result").replaceChildren(...comparison(result));
    return `Dry run: ${count(result.decisions)} decisions taken again`;
  });
}

function comparison(result) {
  if (!result.decisions) return [h("p", { class: "note" }, "No decision is kept yet: send some requests first.")];
  const { present, proposed, decisions, elsewhere, predicted_start_ms_mean_change: change } = result;
  const rows = [present, proposed].map((side, index) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `${side.policy}${index ? "" : " (now)"}`),
      h("td", {}, milliseconds(side.predicted_start_ms_mean)),
      h("td", {}, milliseconds(side.predicted_start_ms_p50)),
      h("td", {}, milliseconds(side.predicted_start_ms_p99)),
    ),
  );
  const heads = ["Predicted start", "mean", "p50", "p99"].map((name) => h("th", { scope: "col" }, name));
  const moved = `Of the last ${count(decisions)} decisions ${count(elsewhere)} (${percent(elsewhere / decisions)}) would go elsewhere`;
  const sooner = Math.abs(change) < 0.05 ? "and start as soon on average" : `and all start ${milliseconds(Math.abs(change))} ${change < 0 ? "sooner" : "later"} on average`;
  return [
    h("p", {}, `${moved}, ${sooner}.`),
    h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
    h("p", { class: "note" }, "Each decision is taken by itself: what it would have changed for the next is not counted."),
  ];
}

async function applyPolicy(event) {
  event.preventDefault();
  const asked = proposal();
  const text = `From the next request on ${asked.policy} decides${asked.weights ? ", with these shares" : ""}. It was ${store.status.policy ?? "unknown"}.`;
  if (!(await confirmed("Change how requests are placed?", text, "Change"))) return;
  await act(event.submitter ?? byId("policy-try"), "Policy", async () => {
    const told = await call("PUT", "/admin/policy", asked);
    showPolicy(told);
    return `${told.policy} decides`;
  });
}

// Pins

async function loadPins() {
  const told = await quietly(() => call("GET", "/admin/pins"));
  if (told) showPins(told.pins);
}

function showPins(pins) {
  const items = pins.map(({ worker, ...subject }) => {
    const named = Object.entries(subject).filter(([, value]) => value);
    const text = named.map(([kind, value]) => `${kind} ${kind === "prefix" ? value.slice(0, 8) : value}`).join(", ");
    const remove = h("button", { type: "button", "aria-label": `Unpin ${text}` }, "Unpin");
    remove.addEventListener("click", () => removePin(remove, text, Object.fromEntries(named)));
    return h("li", {}, h("span", {}, `${text} → ${worker}`), remove);
  });
  byId("pin-list").replaceChildren(...(items.length ? items : [h("li", { class: "note" }, "Nothing is pinned.")]));
}

async function addPin(event) {
  event.preventDefault();
  const [kind, value, worker] = ["pin-kind", "pin-value", "pin-worker"].map((id) => byId(id).value.trim());
  const text = `Requests of ${kind} ${value} go to ${worker} while it can take them.`;
  if (!(await confirmed("Pin them?", text, "Pin"))) return;
  await act(event.submitter ?? byId("pin-value"), "Pin", async () => {
    showPins((await call("PUT", "/admin/pins", { worker, [kind]: value })).pins);
    byId("pin-value").value = "";
    return `${kind} ${value.slice(0, 20)} is pinned to ${worker}`;
  });
}

async function removePin(button, text, subject) {
  if (!(await confirmed("Unpin?", `Requests of ${text} go where the policy sends them.`, "Unpin"))) return;
  await act(button, "Unpin", async () => {
    showPins((await call("DELETE", `/admin/pins?${new URLSearchParams(subject)}`)).pins);
    return `${text} is pinned no longer`;
  });
}

// Shadows

function showShadows(shadows) {
  const box = byId("shadows");
  if (!shadows.length) {
    setText(box, "None is asked. routing.shadow names policies that are asked beside the one that decides.");
    box.className = "note";
    return;
  }
  const heads = ["Policy", "Alike", "Sooner", "Tokens less"].map((name) => h("th", { scope: "col" }, name));
  const rows = shadows.map((shadow) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, shadow.policy),
      h("td", {}, shadow.decisions ? percent(shadow.agreed / shadow.decisions) : "–"),
      h("td", {}, signed(shadow.regret_ms_mean, (value) => milliseconds(value))),
      h("td", {}, signed(shadow.regret_tokens_mean, (value) => count(value))),
    ),
  );
  box.className = "";
  box.replaceChildren(
    h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
    h("p", { class: "note" }, `Means over ${count(Math.max(...shadows.map((shadow) => shadow.decisions)))} decisions: by how much the shadow's choice would have been better.`),
  );
}

const signed = (value, format) => `${value < 0 ? "−" : ""}${format(Math.abs(value))}`;

/** The answer, or nothing where the key is missing: the page asks for it by itself. */
async function quietly(ask) {
  try {
    return await ask();
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}
