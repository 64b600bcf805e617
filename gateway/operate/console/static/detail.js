// Everything of one target, while its dialog is open.

import { TimeSeries } from "./charts/time_series.js";
import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { HEALTH, milliseconds, rate, seconds, share } from "./words.js";

const SAMPLE_S = 2;
const mebibytes = (bytes) => `${Math.round(bytes / 2 ** 20)} MiB`;

export class Detail {
  // follow(id): have the stream tell of this target; "" of none
  constructor(follow) {
    this.follow = follow;
    this.id = "";
    byId("detail-close").addEventListener("click", () => byId("detail").close());
    byId("detail").addEventListener("close", () => {
      this.id = "";
      this.follow("");
    });
    this.row = tableRow([
      { text: (one) => `${one.name} ${one.version}`, head: true },
      { text: (one) => one.state },
      { text: (one) => one.variants.join(", ") },
      { text: (one) => Object.entries(one.costs).map(([name, cost]) => `${name} × ${cost.factor.toFixed(2)}`).join(", ") || "–" },
    ]);
  }

  open(id) {
    this.id = id;
    say(byId("detail-title"), id);
    say(byId("detail-state"), "…");
    byId("detail").showModal();
    this.follow(id);
  }

  show({ id, detail }) {
    if (id !== this.id) return;
    if (!detail) {
      say(byId("detail-state"), "It is gone: the gateway knows no target of this name any more.");
      return;
    }
    byId("detail-now").hidden = document.body.dataset.time !== "past";
    mark(byId("detail-state"), "health", detail.health);
    say(byId("detail-state"), `${HEALTH[detail.health].glyph} ${HEALTH[detail.health].words}${detail.reason ? `: ${detail.reason}` : ""}`);
    this.showFacts(detail);
    this.showTimeline(detail);
    keyed(byId("detail-models"), detail.admin.models, (one) => `${one.name} ${one.version}`, this.row);
  }

  showFacts(one) {
    const battery = one.battery === null ? "" : `${Math.round(100 * one.battery)} %${one.charging ? ", charging" : ""}`;
    const facts = [
      ["Address", `${one.admin.address} over ${one.admin.transport}`],
      ["Found by", one.source],
      ["Places of the site", one.places === null ? "" : `${Math.round(one.places)} compute side by side`],
      ["Up for", seconds(one.up_for_s)],
      ["Round trip", one.rtt_ms === null ? "–" : `${milliseconds(one.rtt_ms)} ± ${milliseconds(one.jitter_ms)}`],
      ["Usually", milliseconds(one.usual_ms)],
      ["Goodput", rate(one.goodput_per_s)],
      ["Late or failed", one.asked ? share(one.late_share) : "–"],
      ["p50 · p95 · p99", [one.p50_ms, one.p95_ms, one.p99_ms].map(milliseconds).join(" · ")],
      ["Queued there", `${one.queued}; ${one.in_flight} of ours under way`],
      ["Wait there", milliseconds(one.wait_ms)],
      ["Last load report", one.heard_s === null ? "none yet" : `${seconds(one.heard_s)} ago`],
      ["Breaker", `${one.breaker}; of the way there ${one.path_breaker}`],
      ["A second costs", one.admin.price],
      ["Battery", battery],
      ["Temperature", one.temperature_c === null ? "" : `${one.temperature_c.toFixed(0)} °C${one.throttled ? ", throttled" : ""}`],
      ["Metered link", one.metered ? "yes" : ""],
      ["Memory of its agent", one.memory_bytes === null ? "" : `${mebibytes(one.memory_bytes)}${one.memory_limit_bytes === null ? "" : ` of ${mebibytes(one.memory_limit_bytes)}`}`],
      ["It can reach", { online: "", "control-lost": "the gateway, but not the broker", "cloud-lost": "the broker, but not the gateway", isolated: "nobody" }[one.mode] ?? one.mode],
      ["Kept for a gateway", one.kept ? `${one.kept} to be brought in` : ""],
      ["Evidence", one.admin.attestation ?? ""],
    ].filter(([, value]) => value !== "");
    keyed(byId("detail-facts"), facts, ([name]) => name, ([name]) => {
      const value = el("dd");
      const node = el("div", {}, el("dt", {}, name), value);
      return { node, update: ([, now]) => say(value, now) };
    });
  }

  showTimeline(one) {
    this.chart ??= new TimeSeries(byId("detail-chart"), [{ label: "round trip", colour: "--one" }], { titledBy: "detail-chart-title" });
    const values = one.timeline_ms;
    const now = Date.now() / 1000;
    this.chart.show([values.map((_, place) => now - (values.length - 1 - place) * SAMPLE_S), values]);
    const seen = values.filter((value) => value !== null);
    const gaps = (values.length - seen.length) * SAMPLE_S;
    say(byId("detail-chart-words"), seen.length ? `From ${milliseconds(Math.min(...seen))} to ${milliseconds(Math.max(...seen))}${gaps ? `; ${gaps} s without a link` : ""}.` : "No round trips were seen.");
  }
}
