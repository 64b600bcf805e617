// A line of a table cell's size, without axes; the newest value lies at the right.

import { svg } from "../dom.js";
import { dotsPath, linePath, segments } from "./line.js";
import { linear } from "./scale.js";

const WIDTH = 120;
const HEIGHT = 24;
const INSET = 1.5; // a line's width

export const sparkline = () => svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "spark", role: "img" }, svg("path"));

// most: the values that fill its width
export function drawSparkline(node, values, most) {
  const top = values.reduce((high, value) => Math.max(high, value ?? 0), 1) * 1.1;
  const x = linear(values.length - most, values.length - 1, INSET, WIDTH - INSET);
  const y = linear(0, top, HEIGHT - INSET, INSET);
  const found = segments(values, x.place, y.place);
  node.firstChild.setAttribute("d", linePath(found) + dotsPath(found));
}
