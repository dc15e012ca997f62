// What the page knows of the gateway: the feed's last state, kept up to date by what has changed since.

import { ApiError, adminKey, bearer, errorOf, events } from "./api.js";

const SILENT_MS_MAX = 15_000;
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];
const SAMPLES_MAX = 300;

export class Store extends EventTarget {
  status = {};
  workers = new Map();
  samples = [];
  fields = [];
  /** connecting, live, lost, locked */
  link = "connecting";
  reason = "";
  #abort = null;
  #again = null;

  /** The fleet's workers in the feed's order. */
  get fleet() {
    return (this.status.worker_names ?? []).map((name) => this.workers.get(name)).filter(Boolean);
  }

  /** One field of all samples, oldest first. */
  series(field) {
    const at = this.fields.indexOf(field);
    return this.samples.map((sample) => sample[at]);
  }

  /** The field's last value. */
  last(field) {
    return this.samples.at(-1)?.[this.fields.indexOf(field)] ?? null;
  }

  /** Follow the feed, forever. A key that changes begins it anew. */
  async run() {
    for (let failures = 0; ; ) {
      const began = Date.now();
      try {
        await this.#follow();
        this.#say("lost", "the feed has ended");
      } catch (error) {
        const locked = error instanceof ApiError && error.status === 401;
        this.#say(locked ? "locked" : "lost", error.message);
      }
      failures = Date.now() - began > 5000 ? 0 : failures + 1;
      await this.#pause(this.link === "locked" ? 3_600_000 : RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
    }
  }

  restart() {
    this.#abort?.abort();
    this.#again?.();
  }

  async #follow() {
    const abort = (this.#abort = new AbortController());
    let silence = setTimeout(() => abort.abort(), SILENT_MS_MAX);
    try {
      const response = await fetch("/status/feed", { headers: bearer(adminKey.get()), signal: abort.signal });
      if (!response.ok) throw await errorOf(response);
      for await (const data of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENT_MS_MAX);
        this.#take(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }

  #take(event) {
    if (event.whole) {
      this.status = {};
      this.workers.clear();
      this.samples = [];
      this.fields = event.sample_fields;
    }
    Object.assign(this.status, event.status);
    for (const [name, worker] of Object.entries(event.workers)) this.workers.set(name, worker);
    const names = new Set(this.status.worker_names);
    for (const name of this.workers.keys()) if (!names.has(name)) this.workers.delete(name);
    this.samples = this.samples.concat(event.samples).slice(-SAMPLES_MAX);
    this.#say("live", "");
    const changed = new Set([...Object.keys(event.status), ...(event.samples.length ? ["samples"] : [])]);
    if (event.whole || Object.keys(event.workers).length) changed.add("workers");
    this.dispatchEvent(new CustomEvent("change", { detail: changed }));
  }

  #say(link, reason) {
    if (link === this.link && reason === this.reason) return;
    this.link = link;
    this.reason = reason;
    this.dispatchEvent(new Event("link"));
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#again = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
