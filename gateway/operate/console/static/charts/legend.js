// A legend names each line, with its value at the cursor, or the newest without a cursor.

import { el, say, svg } from "../dom.js";

export const valueWords = (value) => (Number.isFinite(value) ? value.toFixed(value < 10 ? 1 : 0) : "–");

export class Legend {
  // series: as TimeSeries takes them
  constructor(series) {
    this.values = series.map(() => el("span", { class: "value" }, "–"));
    this.when = el("li", { class: "when" });
    const items = series.map((one, place) => {
      const item = el("li", {}, svg("svg", { class: "key", viewBox: "0 0 18 10", "aria-hidden": "true" }, svg("path", { d: "M0 5H18", "stroke-dasharray": one.dash })), `${one.label} `, this.values[place]);
      item.style.setProperty("--c", `var(${one.colour})`);
      return item;
    });
    this.node = el("ul", { class: "chart-legend" }, ...items, this.when);
  }

  show(values, when) {
    values.forEach((value, place) => say(this.values[place], valueWords(value)));
    say(this.when, when);
  }
}
