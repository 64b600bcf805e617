// Targets: as branches of the gateway (a few, and the rest counted), and as a table.

import { drawSparkline, sparkline } from "./charts/sparkline.js";
import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { HEALTH, milliseconds, rate, share } from "./words.js";

const BRANCHES = 14;
const FIND_AFTER_MS = 250;
const SAMPLES = 60;

const roundTrip = (one) => (one.rtt_ms === null ? "–" : `${milliseconds(one.rtt_ms)} ±${one.jitter_ms < 10 ? one.jitter_ms.toFixed(1) : Math.round(one.jitter_ms)}`);
const name = (one) => one.id.slice(one.id.indexOf("/") + 1);

export class Targets {
  constructor(open) {
    this.open = open;
    this.found = null;
    this.branch = (one) => this.branchOf(one);
    this.row = tableRow([
      { head: true, node: (one) => el("button", { type: "button", class: "link", onclick: () => open(one.id) }, one.id), update: () => {} },
      { node: () => el("span", { class: "health" }), update: health },
      { text: roundTrip, class: "n", title: (one) => (one.usual_ms === null ? "" : `usually ${milliseconds(one.usual_ms)}`) },
      { node: sparkline, update: spark },
      { text: (one) => rate(one.goodput_per_s), class: "n" },
      { text: (one) => (one.asked ? share(one.late_share) : "–"), class: "n" },
      { text: (one) => milliseconds(one.p50_ms), class: "n" },
      { text: (one) => milliseconds(one.p95_ms), class: "n" },
      { text: (one) => milliseconds(one.p99_ms), class: "n" },
      { text: (one) => `${one.queued} + ${one.in_flight}`, class: "n", title: (one) => `${one.queued} queued there, ${one.in_flight} of ours under way; wait ${milliseconds(one.wait_ms)}` },
      { text: (one) => [one.models.join(", "), one.conditions].filter(Boolean).join("; "), class: "models" },
    ]);
    const legend = Object.values(HEALTH).map(({ glyph, words }) => `${glyph} ${words}`).join("   ");
    say(byId("legend"), legend);
  }

  show(snapshot) {
    this.snapshot = snapshot;
    say(byId("hub-name"), snapshot.gateway);
    this.showBranches(snapshot);
    this.showTable();
  }

  showBranches({ targets, health, more_targets: more }) {
    const shown = targets.slice(0, BRANCHES);
    const rest = [];
    for (const tier of ["pool", "site", "edge"].filter((one) => health[one])) {
      for (const [state, count] of Object.entries(health[tier])) {
        const hidden = count - shown.filter((one) => one.tier === tier && one.health === state).length;
        if (hidden > 0) rest.push({ id: `${tier} ${state}`, group: true, tier, health: state, count: hidden });
      }
    }
    keyed(byId("topology"), [...shown, ...rest], (one) => one.id, this.branch);
    const shownRows = targets.length;
    say(byId("targets-more"), this.found ? "" : more ? `and ${more} more; ${shownRows} are shown: pools, then whoever is ill, then the busiest` : "");
  }

  branchOf(first) {
    const label = el("span", { class: "wire-label" });
    const wire = el("span", { class: "wire" }, el("span", { class: "wire-line", "aria-hidden": "true" }), label);
    const glyph = el("span", { class: "glyph", "aria-hidden": "true" });
    const title = el("span", { class: "leaf-name" });
    const words = el("span", { class: "leaf-words" });
    const leaf = first.group
      ? el("span", { class: "leaf group" }, glyph, title, words)
      : el("button", { type: "button", class: "leaf", onclick: () => this.open(first.id) }, glyph, title, words);
    const node = el("li", {}, wire, leaf);
    const update = (one) => {
      mark(node, "health", one.health);
      mark(node, "tier", one.tier);
      say(glyph, HEALTH[one.health].glyph);
      if (one.group) {
        say(label, "");
        say(title, `${one.count} more ${one.tier}${one.count === 1 ? "" : "s"}`);
        say(words, HEALTH[one.health].words);
        return;
      }
      node.style.setProperty("--thick", `${Math.min(7, 1.5 + Math.log2(1 + one.per_s) / 1.5)}px`);
      say(label, one.health === "down" ? "no link" : one.rtt_ms === null ? "" : milliseconds(one.rtt_ms));
      say(title, name(one));
      say(words, `${one.tier} · ${one.health === "well" ? rate(one.per_s) : HEALTH[one.health].words}${one.health === "well" && one.conditions ? ` · ${one.conditions}` : ""}`);
      leaf.title = one.reason || one.notes;
    };
    return { node, update };
  }

  showTable() {
    const rows = this.found ?? this.snapshot.targets;
    keyed(byId("targets"), rows, (one) => one.id, this.row);
  }

  // Names can be looked up only as they are now.
  pause(paused) {
    byId("find").disabled = paused;
    byId("find").placeholder = paused ? "live only" : "part of a name";
    if (paused && this.found) {
      byId("find").value = "";
      this.found = null;
      this.show(this.snapshot);
    }
  }

  // Names are looked up where they are known: at the gateway.
  follow(headers) {
    let timer = 0;
    byId("find").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.find(byId("find").value.trim(), headers), FIND_AFTER_MS);
    });
  }

  async find(words, headers) {
    if (!words) {
      this.found = null;
    } else {
      const response = await fetch(`/console/find?q=${encodeURIComponent(words)}`, { headers: headers() });
      if (!response.ok) return;
      this.found = (await response.json()).targets;
      say(byId("targets-more"), this.found.length ? `${this.found.length} found, as they were when looked up` : `nobody is called so`);
    }
    if (this.snapshot) this.show(this.snapshot);
  }
}

function health(node, one) {
  mark(node, "health", one.health);
  say(node, `${HEALTH[one.health].glyph} ${HEALTH[one.health].words}${one.reason ? `: ${one.reason}` : one.notes ? ` (${one.notes})` : ""}`);
}

function spark(node, one) {
  const values = one.timeline_ms ?? [];
  const seen = values.filter((value) => value !== null);
  drawSparkline(node, values, SAMPLES);
  mark(node, "health", one.health);
  const gaps = values.length - seen.length;
  const words = seen.length ? `round trips of two minutes: ${milliseconds(Math.min(...seen))} to ${milliseconds(Math.max(...seen))}${gaps ? `, ${gaps * 2} s without a link` : ""}` : "no round trips";
  if (node.getAttribute("aria-label") !== words) node.setAttribute("aria-label", words);
}
