// The last requests, and one request's waterfall: where its time went, attempt by attempt.

import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { milliseconds, share } from "./words.js";

const EVERY_MS = 3000;
const SHOWN = 25;
const ASKED = 100;
const PASSED_OVER = 8;

const wentTo = (one) => one.end.served_by ?? "nowhere";
const isOdd = (one) => one.late || Boolean(one.end.error) || one.end.hedged || one.end.fallback;
const because = (one) => [one.end.reason ?? "refused", one.end.hedged && "hedged", one.end.fallback && "fallback", one.end.degraded && "degraded"].filter(Boolean).join(", ");

export class Requests {
  constructor() {
    this.row = tableRow([
      { head: true, node: (one) => el("button", { type: "button", class: "link", onclick: () => this.open(one.number) }, `#${one.number}`), update: () => {} },
      { text: (one) => one.model ?? "–" },
      { text: wentTo },
      { text: because },
      { text: (one) => milliseconds(one.elapsed_ms), class: "n" },
      { text: (one) => milliseconds(one.budget_ms), class: "n" },
      { node: () => el("span", { class: "outcome" }), update: (node, one) => { mark(node, "outcome", one.late ? "late" : one.end.error ? "failed" : "ok"); say(node, one.outcome); } },
    ]);
    this.candidate = tableRow([
      { head: true, node: (one) => el("span", {}, one.target), update: (node, one, cell) => mark(cell.parentNode, "chosen", one.chosen ? "yes" : "no") },
      { text: (one) => `${one.variant}${one.chosen ? " (chosen)" : ""}` },
      { text: (one) => milliseconds(one.link_ms), class: "n" },
      { text: (one) => milliseconds(one.wait_ms), class: "n" },
      { text: (one) => milliseconds(one.compute_ms), class: "n" },
      { text: (one) => milliseconds(one.finish_ms), class: "n" },
      { text: (one) => (one.chance === undefined ? "–" : share(one.chance)), class: "n" },
      { text: (one) => one.cost.toPrecision(2), class: "n" },
    ]);
    byId("request-close").addEventListener("click", () => byId("request").close());
    byId("only-odd").addEventListener("change", () => this.show());
  }

  async follow(headers) {
    this.headers = headers;
    this.known = [];
    for (;;) {
      if (!document.hidden && !byId("hold").checked && document.body.dataset.stream === "live") await this.look();
      await new Promise((done) => setTimeout(done, EVERY_MS));
    }
  }

  async look() {
    try {
      const response = await fetch(`/debug/decisions?last=${ASKED}`, { headers: this.headers() });
      if (response.ok) this.known = (await response.json()).decisions;
    } catch {
      return; // the stream says that the gateway is away
    }
    this.show();
  }

  show() {
    const only = byId("only-odd").checked;
    const rows = this.known.filter((one) => !only || isOdd(one)).slice(0, SHOWN);
    keyed(byId("requests"), rows, (one) => one.number, this.row);
    byId("requests-none").hidden = rows.length > 0;
    say(byId("requests-none"), this.known.length ? "None of the last hundred was late, failed or hedged." : "No request yet.");
  }

  async open(number) {
    const response = await fetch(`/debug/decisions?id=%23${number}`, { headers: this.headers() });
    const [one] = response.ok ? (await response.json()).decisions : [];
    if (!one) return;
    say(byId("request-title"), `Request #${one.number}${one.id ? `, ${one.id}` : ""}`);
    say(byId("request-sentence"), one.sentence);
    say(byId("request-hindsight"), one.hindsight ? `In hindsight: ${one.hindsight.sentence}` : "");
    byId("waterfall").replaceChildren(...waterfall(one));
    byId("candidates").replaceChildren();
    byId("candidates").keyedRows = new Map();
    keyed(byId("candidates"), (one.candidates ?? []).map((each) => ({ ...each, chosen: each.target === one.chosen && each.variant === (one.end.variant ?? each.variant) })), (each) => `${each.target} ${each.variant}`, this.candidate);
    byId("passed-over").replaceChildren(...(one.passed_over ?? []).slice(0, PASSED_OVER).map((each) => el("li", {}, `not ${each.target} in ${each.variant}: ${each.why_not}`)));
    byId("request").showModal();
  }
}

// Lines of {name, from, length, kind, words} on one scale of milliseconds since arrival: the path that the caller waited
// for, whose stages add up, and the attempts side by side.
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

const kindOf = (stage) => (stage.startsWith("link") ? "link" : stage === "batch wait" ? "queue" : stage);

function bar({ name, from, length, kind, words }, end) {
  const line = el("span", { class: "bar-line", "data-kind": kind });
  line.style.setProperty("--from", `${(100 * from) / end}%`);
  line.style.setProperty("--length", `${(100 * length) / end}%`);
  return el("li", {}, el("span", { class: "stage" }, name), el("span", { class: "track", "aria-hidden": "true" }, line), el("span", { class: "took" }, words));
}

function waterfall(one) {
  const { path, attempts } = lines(one);
  const end = Math.max(one.elapsed_ms, ...[...path, ...attempts].map((line) => line.from + line.length), 0.001);
  const budget = one.budget_ms === undefined ? "" : ` of ${milliseconds(one.budget_ms)}`;
  const sum = el("li", { class: `sum${one.late ? " late" : ""}` }, el("span", { class: "stage" }, one.outcome), el("span", { class: "track" }), el("span", { class: "took" }, `${milliseconds(one.elapsed_ms)}${budget}`));
  const tried = attempts.length ? [el("li", { class: "part" }, "Attempts"), ...attempts.map((line) => bar(line, end))] : [];
  return [...path.map((line) => bar(line, end)), sum, ...tried];
}
