// A chart of values over the last five minutes, in SVG: axes, lines, a cursor, and a legend with values.
//
// It is told columns, of which the first holds UTC seconds, and keeps its nodes: an update writes attributes only. It
// draws at most once a frame, so a page out of sight draws nothing. Colours are the page's own, so light and dark need
// no drawing.

import { el, svg } from "../dom.js";
import { Axes, timeOfDay } from "./axes.js";
import { Cursor, firstFrom } from "./cursor.js";
import { Legend, valueWords } from "./legend.js";
import { areaPath, dotsPath, linePath, segments } from "./line.js";
import { linear, logarithmic } from "./scale.js";

const WINDOW_S = 300;
const LEAST_S = 60; // a young line begins at the right
const HEIGHT = 160;
const MARGIN = { left: 42, right: 8, top: 8, bottom: 22 };

export class TimeSeries {
  // series: [{label, colour: "--name", fill?: true, dash?: "6 3"}]; titledBy: the id of what names the chart
  constructor(box, series, { titledBy, log = false }) {
    this.box = box;
    this.series = series;
    this.log = log;
    this.columns = [[], ...series.map(() => [])];
    this.axes = new Axes();
    this.lines = series.map(line);
    this.empty = svg("text", { class: "empty", y: HEIGHT / 2 }, "Nothing was seen yet");
    this.plot = svg("svg", { class: "plot", height: HEIGHT, tabindex: "0", role: "slider", "aria-labelledby": titledBy, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "nothing was seen yet" });
    this.cursor = new Cursor(this.plot, series, () => this.redraw());
    this.plot.append(this.axes.node, this.empty, ...this.lines.map((one) => one.node), this.cursor.node);
    this.legend = new Legend(series);
    box.replaceChildren(el("div", { class: "plot-box" }, this.plot), this.legend.node);
    new ResizeObserver(() => this.redraw()).observe(box);
  }

  show(columns) {
    this.columns = columns;
    this.redraw();
  }

  // Hold the cursor at an instant while nothing else does; null: no longer.
  pin(at) {
    this.cursor.pinned = at;
    this.redraw();
  }

  redraw() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      this.draw();
    });
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return; // in a dialog that is closed
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const frame = { left: MARGIN.left, right: Math.max(MARGIN.left + 1, width - MARGIN.right), top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
    const drawn = inWindow(this.columns);
    const [times, ...columns] = drawn;
    this.empty.setAttribute("x", (frame.left + frame.right) / 2);
    this.empty.setAttribute("visibility", times.length ? "hidden" : "visible");
    const x = timeScale(times, frame);
    const y = this.log ? logarithmicFor(columns, frame) : linearFor(columns, frame);
    if (times.length) this.axes.draw(frame, x, y, this);
    else this.axes.clear();
    this.drawLines(frame, drawn, x, y);
    this.drawCursor(frame, drawn, x, y);
  }

  drawLines(frame, [times, ...columns], x, y) {
    this.lines.forEach(({ area, stroke, dots }, place) => {
      const found = segments(columns[place], (one) => x.place(times[one]), y.place);
      area?.setAttribute("d", areaPath(found, frame.bottom));
      stroke.setAttribute("d", linePath(found));
      dots.setAttribute("d", dotsPath(found));
    });
  }

  drawCursor(frame, [times, ...columns], x, y) {
    const chosen = this.cursor.chosen(times, x);
    const place = chosen ?? times.length - 1;
    const values = columns.map((column) => column[place]);
    const when = chosen === null ? "now" : timeOfDay(times[chosen]);
    this.legend.show(values, times.length ? when : "");
    if (chosen === null) this.cursor.hide();
    else this.cursor.draw(frame, x.place(times[chosen]), values.map((value) => (Number.isFinite(value) ? y.place(value) : NaN)));
    this.sayValues(times.length, place, chosen, `${when}: ${this.series.map((one, at) => `${one.label} ${valueWords(values[at])}`).join(", ")}`);
  }

  // Without a cursor a chart that has the focus keeps its words: words that change every second are never read to their end.
  sayValues(count, place, chosen, words) {
    const current = chosen === null ? "now" : String(this.cursor.at ?? this.cursor.pinned ?? place);
    if (!count || (document.activeElement === this.plot && this.said === current)) return;
    this.said = current;
    this.plot.setAttribute("aria-valuemax", count - 1);
    this.plot.setAttribute("aria-valuenow", place);
    this.plot.setAttribute("aria-valuetext", words);
  }
}

function line({ colour, fill, dash }) {
  const area = fill ? svg("path", { class: "area" }) : null;
  const stroke = svg("path", { class: "line", "stroke-dasharray": dash });
  const dots = svg("path", { class: "dots" });
  const node = svg("g", { "aria-hidden": "true" }, area, stroke, dots);
  node.style.setProperty("--c", `var(${colour})`);
  return { node, area, stroke, dots };
}

const lastOf = (times) => times[times.length - 1] ?? 0;

function inWindow(columns) {
  const from = firstFrom(columns[0], lastOf(columns[0]) - WINDOW_S);
  return columns.map((column) => column.slice(from));
}

function timeScale(times, frame) {
  const last = lastOf(times);
  return linear(Math.min(times[0] ?? 0, last - LEAST_S), last, frame.left, frame.right);
}

function range(columns) {
  let [low, high] = [Infinity, -Infinity];
  for (const column of columns) {
    for (const value of column) {
      if (!Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return [low, high];
}

const linearFor = (columns, frame) => linear(0, Math.max(1, range(columns)[1] * 1.1), frame.bottom, frame.top);

function logarithmicFor(columns, frame) {
  const [low, high] = range(columns);
  const least = Math.max(0.1, (Number.isFinite(low) ? low || 1 : 1) * 0.8);
  return logarithmic(least, Math.max(2 * least, (Number.isFinite(high) ? high : 100) * 1.25), frame.bottom, frame.top);
}
