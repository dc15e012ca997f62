// Small charts of the last minutes: lines or stacked areas, with their last values as text beside them.

import { h, setAttribute, setText, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;

export class Chart {
  #paths = [];
  #values = [];
  #svg;
  #top;
  #none;

  /**
   * `series`: {name, className, field, format} each; `stacked` puts areas upon each other; `most` fixes the top, which
   * is else a round number above all that is shown; `none` is said where there is nothing to show.
   */
  constructor({ title, series, stacked = false, most = null, none = "Nothing yet", format }) {
    this.title = title;
    this.series = series;
    this.stacked = stacked;
    this.most = most;
    this.format = format;
    this.#paths = series.map(({ className }) => svg("path", { class: `${stacked ? "area" : "line"} ${className}` }));
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    const grid = [0.5, 1].map((part) => svg("path", { class: "grid", d: `M0 ${HEIGHT * (1 - part) + 0.5}H${WIDTH}` }));
    this.#svg = svg("svg", box, ...grid, ...this.#paths);
    this.#top = h("span", { class: "top" });
    const legend = series.map(({ name, className }) => {
      const value = h("b", {}, "–");
      this.#values.push(value);
      return h("li", {}, h("i", { class: `key ${className}` }), `${name} `, value);
    });
    this.#none = h("span", { class: "none" }, none);
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, title),
      h("div", { class: "plot" }, this.#svg, this.#top, this.#none),
      h("ul", { class: "legend" }, ...legend),
    );
  }

  update(store) {
    const columns = this.series.map(({ field, scale = 1 }) =>
      store.series(field).map((value) => (value === null ? null : value * scale)),
    );
    const levels = this.stacked ? stack(columns) : columns;
    const top = this.most ?? roundAbove(Math.max(0, ...levels.flat().filter(Number.isFinite)));
    levels.forEach((level, index) => {
      const floor = this.stacked ? (levels[index - 1] ?? null) : undefined;
      // A line along the ground would look like something.
      const drawn = level.some((value) => value) ? level : [];
      this.#paths[index].setAttribute("d", floor === undefined ? line(drawn, top) : area(level, floor, top));
    });
    const said = this.series.map(({ name }, index) => {
      const value = columns[index].at(-1) ?? null;
      const text = value === null ? "–" : this.format(value);
      setText(this.#values[index], text);
      return `${name} ${text}`;
    });
    this.#none.hidden = levels.flat().some((value) => value);
    setText(this.#top, top > 0 ? this.format(top) : "");
    setAttribute(this.#svg, "aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** Each series upon those before it; where there is nothing, nothing is added. */
function stack(columns) {
  const levels = [];
  for (const column of columns) {
    const below = levels.at(-1);
    levels.push(column.map((value, index) => (value ?? 0) + (below ? below[index] : 0)));
  }
  return levels;
}

function roundAbove(value) {
  if (value <= 0) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

/** The newest at the right edge; as many places as are kept when the ring is full, fewer at first. */
const across = (index, total) => (total < 2 ? WIDTH : (index / (total - 1)) * WIDTH);
const up = (value, top) => HEIGHT - 1 - (top > 0 ? Math.min(value / top, 1) : 0) * (HEIGHT - 3);

function line(values, top) {
  let path = "";
  let drawing = false;
  values.forEach((value, index) => {
    if (value === null) drawing = false;
    else {
      path += `${drawing ? "L" : "M"}${across(index, values.length).toFixed(1)} ${up(value, top).toFixed(1)}`;
      drawing = true;
    }
  });
  return path;
}

function area(values, floor, top) {
  if (!values.length) return "";
  const point = (value, index) => `${across(index, values.length).toFixed(1)} ${up(value, top).toFixed(1)}`;
  const back = values.map((_, index) => point(floor ? floor[index] : 0, index)).reverse();
  return `M${values.map(point).join("L")}L${back.join("L")}Z`;
}
