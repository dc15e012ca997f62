// Questions and notices.

import { ApiError, adminKey } from "./api.js";
import { byId, h, setText } from "./dom.js";

const NOTICE_MS = 8000;

/** A line in the corner; errors stay until they are dismissed. */
export function notify(text, kind = "done") {
  const close = h("button", { type: "button", "aria-label": "Dismiss", onclick: () => notice.remove() }, "×");
  const notice = h("p", { class: `notice ${kind}` }, h("span", {}, text), close);
  const box = byId("notices");
  box.append(notice);
  // Shown anew, it lies upon any dialog that is open.
  if (box.matches(":popover-open")) box.hidePopover();
  box.showPopover();
  if (kind === "done") setTimeout(() => notice.remove(), NOTICE_MS);
}

/** Whether the operator means it. */
export function confirmed(title, text, verb) {
  const dialog = byId("confirm-dialog");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), verb);
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Does what was asked for; tells how it went, and asks for the key where that was what it lacked. */
export async function act(button, what, action) {
  button.disabled = true;
  button.setAttribute("aria-busy", "true");
  try {
    const done = await action();
    notify(typeof done === "string" ? done : `${what}: done`);
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    notify(`${what}: refused. ${error.message}`, "failed");
    if (error.status === 401) askForKey("That needs the admin key.");
    return false;
  } finally {
    button.disabled = false;
    button.removeAttribute("aria-busy");
  }
}

export function askForKey(why) {
  const dialog = byId("key-dialog");
  setText(byId("key-why"), why);
  byId("key-input").value = "";
  if (!dialog.open) dialog.showModal();
  byId("key-input").focus();
}

/** `changed` is called when there is another key, or none. */
export function wireDialogs(changed) {
  const dialog = byId("key-dialog");
  byId("confirm-yes").addEventListener("click", () => byId("confirm-dialog").close("yes"));
  byId("confirm-no").addEventListener("click", () => byId("confirm-dialog").close(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-button").addEventListener("click", () => askForKey("The gateway's status and actions are behind its admin key."));
  byId("key-forget").addEventListener("click", () => {
    adminKey.forget();
    dialog.close();
    changed();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    adminKey.set(byId("key-input").value.trim());
    dialog.close();
    changed();
  });
}
