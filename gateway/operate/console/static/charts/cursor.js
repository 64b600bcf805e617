// A cursor chooses one point of a chart: it follows the pointer, or the arrow keys while the chart has the focus.
//
// The pointer holds a place on the screen, and time passes under it. The keys hold an instant, which moves with its line.

import { svg } from "../dom.js";

const LEAP = 10; // points, of Page Up and Page Down

export class Cursor {
  // plot: the chart's <svg>; changed(): draws it anew
  constructor(plot, series, changed) {
    this.pixel = null;
    this.at = null;
    this.pinned = null; // an instant, for as long as neither pointer nor keys choose one
    this.times = [];
    this.changed = changed;
    this.line = svg("path", { class: "cursor-line" });
    this.points = series.map((one) => {
      const point = svg("circle", { r: 3.5 });
      point.style.setProperty("--c", `var(${one.colour})`);
      return point;
    });
    this.node = svg("g", { class: "cursor", "aria-hidden": "true" }, this.line, ...this.points);
    plot.addEventListener("pointermove", (event) => this.hold(event.clientX - plot.getBoundingClientRect().left, null));
    plot.addEventListener("pointerdown", (event) => this.hold(event.clientX - plot.getBoundingClientRect().left, null));
    for (const end of ["pointerleave", "pointercancel"]) plot.addEventListener(end, () => this.hold(null, this.at));
    plot.addEventListener("blur", () => this.hold(this.pixel, null));
    plot.addEventListener("keydown", (event) => this.onKey(event));
  }

  hold(pixel, at) {
    this.pixel = pixel;
    this.at = at;
    this.changed();
  }

  onKey(event) {
    const last = this.times.length - 1;
    const held = this.at ?? this.pinned;
    const here = held === null ? last + 1 : nearest(this.times, held);
    const wanted = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - LEAP, PageDown: here + LEAP, Home: 0, End: last + 1 }[event.key];
    if (wanted === undefined || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.hold(null, wanted > last ? null : this.times[Math.max(0, wanted)]); // past the newest there is no cursor
  }

  // The place of the chosen point among `times`; null without one. `times` holds those that are drawn, oldest first.
  chosen(times, x) {
    this.times = times;
    const held = this.at ?? this.pinned;
    if (!times.length || (this.pixel === null && held === null)) return null;
    return nearest(times, this.pixel === null ? held : x.value(this.pixel));
  }

  // heights: of the lines at the chosen point; NaN where a line has a gap
  draw(frame, left, heights) {
    this.line.setAttribute("d", `M${Math.round(left) + 0.5} ${frame.top}V${frame.bottom}`);
    this.points.forEach((point, place) => {
      const there = Number.isFinite(heights[place]);
      point.setAttribute("visibility", there ? "inherit" : "hidden");
      if (!there) return;
      point.setAttribute("cx", left.toFixed(1));
      point.setAttribute("cy", heights[place].toFixed(1));
    });
    this.node.setAttribute("visibility", "visible");
  }

  hide() {
    this.node.setAttribute("visibility", "hidden");
  }
}

// The first of `times` at or after `at`; as many as there are where none is.
export function firstFrom(times, at) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(times, at) {
  const after = Math.min(firstFrom(times, at), times.length - 1);
  return after > 0 && at - times[after - 1] <= times[after] - at ? after - 1 : after;
}
