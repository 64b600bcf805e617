// uPlot, dressed in the page's colours. A chart is told columns; it does the rest, also when the light changes.

/* global uPlot */

const WINDOW_S = 300;
const LEAST_S = 60; // a young line begins at the right

const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const decades = (_, ticks) => ticks.map((tick) => (Number.isInteger(Math.log10(tick)) ? tick : null));
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  // series: [{label, colour: "--name", fill?: true, dash?: [..]}]
  constructor(box, series, { log = false } = {}) {
    this.box = box;
    this.series = series;
    this.log = log;
    this.columns = [[], ...series.map(() => [])];
    this.draw();
    dark.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.fit()).observe(box);
  }

  draw() {
    this.plot?.destroy();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const scale = this.log ? { distr: 3, range: (_, low, high) => [Math.max(0.1, (low || 1) * 0.8), (high || 100) * 1.25] } : { range: (_, __, high) => [0, Math.max(1, high * 1.1)] };
    this.plot = new uPlot(
      {
        width: this.width(),
        height: 150,
        cursor: { points: { size: 6 }, drag: { x: false, y: false } },
        legend: { live: true },
        scales: { x: { time: true, range: (_, first, last) => [Math.max((last ?? 0) - WINDOW_S, Math.min(first ?? 0, (last ?? 0) - LEAST_S)), last ?? 0] }, y: scale },
        axes: [{ ...axis, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...axis, grid: { ...axis.grid, filter: this.log ? decades : (_, ticks) => ticks }, size: 46, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : tick >= 1000 ? `${tick / 1000}k` : `${Number(tick.toPrecision(2))}`)) }],
        series: [
          { value: (_, at) => (at === null ? "–" : clock(at)) },
          ...this.series.map((one) => ({
            label: one.label,
            stroke: colour(one.colour),
            fill: one.fill ? colour(`${one.colour}-fill`) : undefined,
            width: 1.5,
            dash: one.dash,
            spanGaps: false,
            points: { show: false },
            value: (_, value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0)),
          })),
        ],
      },
      this.columns,
      this.box,
    );
  }

  width() {
    return Math.max(200, this.box.clientWidth);
  }

  fit() {
    if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: 150 });
  }

  show(columns) {
    this.columns = columns;
    this.plot.setData(columns);
  }
}

// A line of round trips as an SVG path's `d`, within width × height, the newest at the right; gaps where there was no link.
export function sparkline(values, width, height, most) {
  const seen = values.filter((one) => one !== null);
  if (!seen.length) return "";
  const top = Math.max(...seen, 1) * 1.1;
  const step = width / (most - 1);
  const left = width - (values.length - 1) * step;
  let path = "";
  let drawing = false;
  values.forEach((value, place) => {
    if (value !== null) path += `${drawing ? "L" : "M"}${(left + place * step).toFixed(1)} ${(height - 1 - (value / top) * (height - 2)).toFixed(1)}`;
    drawing = value !== null;
  });
  return path;
}
