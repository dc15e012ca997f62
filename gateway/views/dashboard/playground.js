// A chat through the gateway, as any client would: streamed, each answer beside the receipt of its request.

import { call, bearer, errorOf, events } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { receiptElement } from "./receipts.js";
import { fillSelect } from "./steering.js";

const RECEIPT_TRIES = 4;
const RECEIPT_PAUSE_MS = 250;

const conversation = [];
let abort = null;

export function wirePlayground(store) {
  const form = byId("chat-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  byId("chat-stop").addEventListener("click", () => abort?.abort());
  byId("chat-clear").addEventListener("click", () => {
    abort?.abort();
    conversation.length = 0;
    byId("chat").replaceChildren();
  });
  let models = "";
  return (changed) => {
    if (!changed.has("models")) return;
    const named = store.status.models.flatMap(({ model, adapters }) => [model, ...adapters]);
    if (named.join() !== models) fillSelect(byId("chat-model"), named);
    models = named.join();
  };
}

async function send() {
  const text = byId("chat-text").value.trim();
  if (!text || abort) return;
  byId("chat-text").value = "";
  conversation.push({ role: "user", content: text });
  const answer = h("p", { class: "said" });
  const receipt = h("div", { class: "aside" });
  byId("chat").append(
    h("li", { class: "asked" }, h("p", { class: "said" }, text)),
    h("li", { class: "answered" }, answer, receipt),
  );
  abort = new AbortController();
  busy(true);
  try {
    const content = await ask(answer, receipt);
    conversation.push({ role: "assistant", content });
  } catch (error) {
    conversation.pop();
    const stopped = error.name === "AbortError";
    answer.append(h("span", { class: stopped ? "note" : "failed" }, stopped ? " (stopped)" : `Refused: ${error.message}`));
  } finally {
    abort = null;
    busy(false);
    byId("chat-text").focus();
  }
}

function busy(is) {
  byId("chat-send").disabled = is;
  byId("chat-stop").hidden = !is;
}

/** The answer's text, which grows in its element as it comes. */
async function ask(answer, receipt) {
  const body = {
    model: byId("chat-model").value,
    messages: conversation,
    max_tokens: Number(byId("chat-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const headers = { "content-type": "application/json", ...bearer(byId("chat-key").value.trim()) };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: abort.signal });
  if (!response.ok) throw await errorOf(response);
  let content = "";
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    content += event.choices?.[0]?.delta?.content ?? "";
    setText(answer, content);
  }
  await showReceipt(receipt, response.headers.get("x-request-id"));
  return content;
}

/** Its receipt, complete as soon as the gateway has read the answer's end. */
async function showReceipt(box, id) {
  for (let tries = 0; tries < RECEIPT_TRIES; tries += 1) {
    try {
      const receipt = await call("GET", `/status/receipts/${encodeURIComponent(id)}`);
      box.replaceChildren(receiptElement(receipt, true));
      if (receipt.reported_prompt_tokens !== null) return;
    } catch (error) {
      box.replaceChildren(h("p", { class: "note" }, `No receipt: ${error.message}`));
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, RECEIPT_PAUSE_MS));
  }
}
