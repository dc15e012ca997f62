// The page's only way to make and change elements: nothing is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties, `class`, `data-*`, `aria-*` and other attributes, listeners (`onclick`) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Writes only what differs: what is selected, or being read aloud, stays as it is. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Makes a list's children those of `items`, by key: elements stay, and with them focus and what is unfolded. */
export function keyed(list, known, items, keyOf, create, update) {
  const keys = new Set();
  let place = list.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    keys.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = create(item)));
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
  }
  for (const [key, element] of known) {
    if (!keys.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
}

/** Whether somebody points at something inside it, or is there by keyboard: nothing may move from under them. */
export function isHeld(box) {
  return box.matches(":hover") || (box !== document.activeElement && box.contains(document.activeElement));
}

// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => whole.format(value);
export const compact = (value) => (value < 10_000 ? whole.format(value) : short.format(value));
export const percent = (share, digits = 0) => (share === null ? "–" : `${(share * 100).toFixed(digits)} %`);

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 10 ? `${whole.format(value)} ms` : `${value.toFixed(1)} ms`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export const rate = (value) => (value >= 10 ? whole.format(value) : value.toFixed(1));

export function duration(seconds) {
  if (seconds < 90) return `${whole.format(seconds)} s`;
  if (seconds < 5400) return `${whole.format(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${whole.format(seconds / 86_400)} days`;
}

export const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
