// Axes: a grid and its labels. One path holds the whole grid; labels are kept and reused.

import { say, svg } from "../dom.js";
import { linearTicks, logarithmicTicks, timeTicks } from "./scale.js";

const APART_X = 80; // pixels between two labels, at least
const APART_Y = 26;
const HALF_CHARACTER = 3.3; // of a label, on average
const BASELINE = 4; // from a label's middle down to its baseline
const UNDER = 15; // from the plot's bottom down to the baseline of its times

const minutes = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const seconds = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const timeOfDay = (at) => seconds.format(at * 1000);

const isMinute = (at) => at % 60 === 0;
const timeLabels = (ticks) => ticks.map((at) => (ticks.every(isMinute) ? minutes : seconds).format(at * 1000));

function numberLabel(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  return value >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : `${Number(value.toPrecision(3))}`;
}

export class Axes {
  constructor() {
    this.grid = svg("path", { class: "grid" });
    this.times = svg("g", { class: "times" });
    this.numbers = svg("g", { class: "numbers" });
    this.node = svg("g", { "aria-hidden": "true" }, this.grid, this.times, this.numbers);
  }

  // frame: {left, right, top, bottom} of the plot, in pixels
  draw(frame, x, y, { log }) {
    const acrossX = timeTicks(x, Math.max(1, Math.floor((frame.right - frame.left) / APART_X)));
    const acrossY = (log ? logarithmicTicks : linearTicks)(y, Math.max(2, Math.floor((frame.bottom - frame.top) / APART_Y)));
    const crisp = (pixel) => Math.round(pixel) + 0.5;
    const upright = acrossX.map((at) => `M${crisp(x.place(at))} ${frame.top}V${frame.bottom}`);
    const level = acrossY.map((value) => `M${frame.left} ${crisp(y.place(value))}H${frame.right}`);
    this.grid.setAttribute("d", [...upright, ...level].join(""));
    const words = timeLabels(acrossX);
    const inside = (pixel, label) => Math.min(pixel, frame.right - HALF_CHARACTER * label.length);
    labels(this.times, acrossX.map((at, place) => [inside(x.place(at), words[place]), frame.bottom + UNDER, words[place]]));
    labels(this.numbers, acrossY.map((value) => [frame.left - 6, y.place(value) + BASELINE, numberLabel(value)]));
  }

  clear() {
    this.grid.setAttribute("d", "");
    labels(this.times, []);
    labels(this.numbers, []);
  }
}

// One <text> per [x, y, words].
function labels(group, wanted) {
  while (group.children.length > wanted.length) group.lastChild.remove();
  while (group.children.length < wanted.length) group.append(svg("text"));
  wanted.forEach(([x, y, words], place) => {
    const node = group.children[place];
    node.setAttribute("x", x.toFixed(1));
    node.setAttribute("y", y.toFixed(1));
    say(node, words);
  });
}
