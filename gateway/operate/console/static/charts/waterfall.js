// A request's waterfall: bars on one scale of milliseconds since arrival. First the path that the caller waited for, whose
// stages add up, and then the attempts side by side.

import { el, svg } from "../dom.js";
import { milliseconds } from "../words.js";

const LEAST_PERCENT = 0.6; // a bar that can be seen

const kindOf = (stage) => (stage.startsWith("link") ? "link" : stage === "batch wait" ? "queue" : stage);

// Lines of {name, from, length, kind, words}.
function lines({ waterfall }) {
  const path = waterfall.path.map((stage) => ({ name: stage.stage, from: stage.start_ms, length: stage.took_ms, kind: kindOf(stage.stage), words: [milliseconds(stage.took_ms), stage.words].filter(Boolean).join(", ") }));
  if (waterfall.unaccounted_ms) path.push({ name: "unaccounted", from: 0, length: 0, kind: "none", words: `${waterfall.unaccounted_ms.toFixed(3)} ms: stages overlap` });
  const attempts = waterfall.attempts.map((one) => ({
    name: `${one.target} in ${one.variant}`,
    from: one.start_ms,
    length: one.took_ms,
    kind: one.end || "open",
    words: [one.reason, one.end || "left open", milliseconds(one.took_ms), one.predicted_ms ? `predicted ${milliseconds(one.predicted_ms)}` : "", one.error].filter(Boolean).join(", "),
  }));
  return { path, attempts };
}

function bar({ name, from, length, kind, words }, end) {
  const left = Math.min((100 * from) / end, 100 - LEAST_PERCENT);
  const width = Math.min(Math.max((100 * length) / end, LEAST_PERCENT), 100 - left);
  const line = svg("rect", { class: "bar-line", "data-kind": kind, x: `${left}%`, width: `${width}%`, height: "100%", rx: 3 });
  return el("li", {}, el("span", { class: "stage" }, name), svg("svg", { class: "track", "aria-hidden": "true" }, line), el("span", { class: "took" }, words));
}

// The items of the list, for a request as `/debug/decisions` tells it.
export function waterfall(one) {
  const { path, attempts } = lines(one);
  const end = Math.max(one.elapsed_ms, ...[...path, ...attempts].map((line) => line.from + line.length), 0.001);
  const budget = one.budget_ms === undefined ? "" : ` of ${milliseconds(one.budget_ms)}`;
  const sum = el("li", { class: `sum${one.late ? " late" : ""}` }, el("span", { class: "stage" }, one.outcome), el("span", { class: "track" }), el("span", { class: "took" }, `${milliseconds(one.elapsed_ms)}${budget}`));
  const tried = attempts.length ? [el("li", { class: "part" }, "Attempts"), ...attempts.map((line) => bar(line, end))] : [];
  return [...path.map((line) => bar(line, end)), sum, ...tried];
}
