// Wires the page: one store that follows the gateway, and the views that show it.

import { adminKey } from "./api.js";
import { askForKey, wireDialogs } from "./dialogs.js";
import { byId, setText } from "./dom.js";
import { wireFleet } from "./fleet.js";
import { wireOverview } from "./overview.js";
import { wirePlayground } from "./playground.js";
import { wirePrefixes } from "./prefixes.js";
import { wireReceipts } from "./receipts.js";
import { wireSteering } from "./steering.js";
import { Store } from "./store.js";
import { wireWorker } from "./worker.js";

const LINK = { connecting: "connecting", live: "live", lost: "connection lost", locked: "key needed" };
const THEME = "ropeway-theme";

const store = new Store();
const views = [wireOverview, wireFleet, wireReceipts, wirePrefixes, wireSteering, wirePlayground, wireWorker].map((wire) => wire(store));
const changed = new Set();
let frame = 0;

function render() {
  frame = 0;
  const parts = new Set(changed);
  changed.clear();
  for (const view of views) view(parts);
  if (!performance.getEntriesByName("live").length) performance.mark("live");
}

store.addEventListener("change", (event) => {
  for (const part of event.detail) changed.add(part);
  // A hidden page draws nothing until it is looked at again.
  frame ||= requestAnimationFrame(render);
});

store.addEventListener("link", () => {
  const link = byId("link");
  link.dataset.state = store.link;
  link.title = store.reason;
  setText(link, LINK[store.link]);
  document.body.classList.toggle("stale", store.link !== "live");
  if (store.link === "locked") {
    askForKey(adminKey.get() ? "The gateway does not know that key." : "The gateway's status is behind its admin key.");
  }
});

function showTheme(theme) {
  byId("theme").value = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

showTheme(localStorage.getItem(THEME) ?? "auto");
byId("theme").addEventListener("change", ({ target }) => {
  localStorage.setItem(THEME, target.value);
  showTheme(target.value);
});
wireDialogs(() => store.restart());
store.run();
