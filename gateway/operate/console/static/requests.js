// The last requests, and one request's waterfall: where its time went, attempt by attempt.

import { waterfall } from "./charts/waterfall.js";
import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { because, milliseconds, share, tokensOf, wentTo } from "./words.js";

const EVERY_MS = 3000;
const SHOWN = 25;
const ASKED = 100;
const PASSED_OVER = 8;

const isOdd = (one) => one.late || Boolean(one.end.error) || one.end.hedged || one.end.fallback;

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
    this.before = null; // an instant of the gateway's machine, while the page is paused at one
    byId("only-odd").addEventListener("change", () => this.show());
  }

  async follow(headers) {
    this.headers = headers;
    this.known = [];
    for (;;) {
      if (!document.hidden && !byId("hold").checked && this.before === null && document.body.dataset.stream === "live") await this.look();
      await new Promise((done) => setTimeout(done, EVERY_MS));
    }
  }

  // Show those that had ended at this instant; null: now.
  pause(before) {
    this.before = before;
    return this.look();
  }

  async look() {
    const before = this.before;
    const until = before === null ? "" : `&before=${before}`;
    try {
      const response = await fetch(`/debug/decisions?last=${ASKED}${until}`, { headers: this.headers() });
      if (response.ok && before === this.before) this.known = (await response.json()).decisions;
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
    say(byId("requests-none"), this.known.length ? "None of the last hundred was late, failed or hedged." : this.before === null ? "No request yet." : "The gateway remembers no request from before then.");
  }

  async open(number) {
    const response = await fetch(`/debug/decisions?id=%23${number}`, { headers: this.headers() });
    const [one] = response.ok ? (await response.json()).decisions : [];
    if (!one) return;
    say(byId("request-title"), `Request #${one.number}${one.id ? `, ${one.id}` : ""}`);
    say(byId("request-sentence"), one.sentence);
    say(byId("request-tokens"), tokensOf(one.tokens));
    say(byId("request-hindsight"), one.hindsight ? `In hindsight: ${one.hindsight.sentence}` : "");
    byId("waterfall").replaceChildren(...waterfall(one));
    byId("candidates").replaceChildren();
    byId("candidates").keyedRows = new Map();
    keyed(byId("candidates"), (one.candidates ?? []).map((each) => ({ ...each, chosen: each.target === one.chosen && each.variant === (one.end.variant ?? each.variant) })), (each) => `${each.target} ${each.variant}`, this.candidate);
    byId("passed-over").replaceChildren(...(one.passed_over ?? []).slice(0, PASSED_OVER).map((each) => el("li", {}, `not ${each.target} in ${each.variant}: ${each.why_not}`)));
    byId("request").showModal();
  }
}
