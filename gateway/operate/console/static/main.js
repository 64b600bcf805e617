// The page: one stream in, every part of the screen updated from it.

import { TimeSeries } from "./charts/time_series.js";
import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { Detail } from "./detail.js";
import { Extras } from "./extras.js";
import { Requests } from "./requests.js";
import { headers, keep, Stream } from "./stream.js";
import { Targets } from "./targets.js";
import { Timeline } from "./timeline.js";
import { milliseconds, rate, share, STATE } from "./words.js";

const POINTS = 300;
const TABLE_EVERY = 10;
const TABLE_ROWS = 12;

const points = []; // [at, in time, late, failed, p50, p95, p99, in flight]
const charts = {};
const stream = new Stream({ event: onEvent, state: onState });
const detail = new Detail((target) => stream.follow(target));
const targets = new Targets((id) => detail.open(id));
const requests = new Requests();
const extras = new Extras();
const timeline = new Timeline({ past: showPast, live: showNow });
let live = null; // the newest snapshot
let lastAt = 0;
let isHeard = true; // whether the gateway is; until the first snapshot nothing is said of it

function onEvent(name, contents) {
  if (name === "history") {
    points.splice(0, points.length, ...contents.points);
    timeline.begin(contents.moments);
    drawCharts();
  } else if (name === "snapshot") {
    onSnapshot(contents);
  } else if (name === "target") {
    detail.show(contents);
  }
}

function onState(state, words) {
  mark(byId("connection"), "state", state);
  say(byId("connection"), { live: "live", lost: "lost: asking again", refused: "a key is needed" }[state]);
  byId("key-form").hidden = state !== "refused";
  document.body.dataset.stream = state;
  isHeard = state === "live";
  if (state === "refused") {
    say(byId("key-words"), words);
    byId("key").focus();
  }
  if (!isHeard && live) {
    sayTitle("lost");
    if (!timeline.paused) sayLost();
  }
}

// Also where its stream was refused: what was well when a key ran out may be anything now.
function sayLost() {
  sayVerdict({ state: "lost", sentence: `No word from the gateway since ${new Date(lastAt * 1000).toLocaleTimeString()}`, findings: [] });
}

function sayTitle(state) {
  document.title = `${state === "well" ? "" : "! "}${live.gateway} · Tidegate`;
}

function onSnapshot(snapshot) {
  live = snapshot;
  lastAt = snapshot.at;
  sayTitle(snapshot.verdict.state); // also while the page is paused
  const last = points[points.length - 1];
  const isNew = snapshot.point && (!last || snapshot.point[0] > last[0]);
  if (isNew) points.push(snapshot.point);
  if (points.length > POINTS) points.shift();
  timeline.heard(snapshot.at, snapshot.moment);
  if (timeline.paused) return;
  show(snapshot);
  if (isNew) drawCharts();
}

function show(snapshot) {
  say(byId("gateway"), snapshot.gateway);
  sayVerdict(snapshot.verdict);
  sayFigures(snapshot);
  targets.show(snapshot);
  sayWays(snapshot.ways);
  sayClasses(snapshot.classes);
  extras.show(snapshot);
}

// The charts stand still, with their cursor at the instant that is shown.
function showPast(snapshot, at) {
  show(snapshot);
  targets.pause(true);
  requests.pause(snapshot.now);
  for (const chart of Object.values(charts)) chart.pin(at);
}

function showNow() {
  targets.pause(false);
  requests.pause(null);
  for (const chart of Object.values(charts)) chart.pin(null);
  if (live) show(live);
  if (live && !isHeard) sayLost();
  drawCharts();
}

function sayVerdict(verdict) {
  mark(byId("verdict"), "state", verdict.state);
  say(byId("state-mark"), STATE[verdict.state].glyph);
  say(byId("state"), STATE[verdict.state].words);
  say(byId("sentence"), verdict.findings.length ? verdict.findings[0].words : verdict.sentence);
  const rest = verdict.findings.slice(1);
  keyed(byId("findings"), rest, (one) => one.words.replace(/[\d.]+/g, "#"), () => {
    const node = el("li");
    return { node, update: (one) => { mark(node, "level", one.level); say(node, one.words); } };
  });
  const announced = `${STATE[verdict.state].words}. ${verdict.findings.length ? `${verdict.findings.length} findings` : verdict.sentence}`;
  say(byId("announce"), announced); // numbers that move every second would never let a reader finish
}

function sayFigures({ total, door, health }) {
  const up = (tier) => Object.entries(health[tier]).filter(([name]) => name !== "down").reduce((sum, [, count]) => sum + count, 0);
  const all = (tier) => Object.values(health[tier]).reduce((sum, count) => sum + count, 0);
  const figures = [
    { name: "Goodput", value: rate(total.goodput_per_s), note: "answers in time" },
    { name: "Late or failed", value: share(total.late_share), note: `of ${rate(total.per_s)}`, bad: total.late_share >= 0.02 },
    { name: "p50 · p95 · p99", value: [total.p50_ms, total.p95_ms, total.p99_ms].map((one) => milliseconds(one).replace(" ms", "")).join(" · "), note: "milliseconds, last minute" },
    { name: "Inside now", value: `${door.in_flight}`, note: `at most ${Math.round(door.limit)}${door.shed ? `; ${door.shed} refused so far` : ""}`, bad: door.overloaded },
    { name: "Edges up", value: `${up("edge")} of ${all("edge")}`, note: "", bad: up("edge") < all("edge") },
    { name: "Pools up", value: `${up("pool")} of ${all("pool")}`, note: "", bad: up("pool") < all("pool") },
  ];
  if (health.site) figures.push({ name: "Sites up", value: `${up("site")} of ${all("site")}`, note: "", bad: up("site") < all("site") });
  keyed(byId("figures"), figures, (one) => one.name, (one) => {
    const value = el("dd", { class: "value" });
    const note = el("dd", { class: "note" });
    const node = el("div", {}, el("dt", {}, one.name), value, note);
    return { node, update: (now) => { say(value, now.value); say(note, now.note); mark(node, "bad", now.bad ? "yes" : "no"); } };
  });
  say(byId("hub-rate"), `${rate(total.per_s)} in`);
  say(byId("hub-inside"), `${door.in_flight} inside`);
}

const wayRow = tableRow([
  { text: (one) => one.to, head: true },
  { text: (one) => one.why },
  {
    class: "wide",
    node: () => el("span", { class: "barred" }, el("progress", { max: "1" }), el("span")),
    update: (node, one) => {
      node.firstChild.value = one.share;
      node.firstChild.setAttribute("aria-label", `share of requests: ${share(one.share)}`);
      mark(node, "unanswered", one.answered ? "no" : "yes");
      say(node.lastChild, share(one.share));
    },
  },
  { text: (one) => rate(one.per_s), class: "n" },
  { text: (one) => milliseconds(one.p95_ms), class: "n" },
]);

function sayWays(ways) {
  const all = ways.reduce((sum, one) => sum + one.asked, 0) || 1;
  keyed(byId("ways"), ways.map((one) => ({ ...one, share: one.asked / all })), (one) => `${one.to} ${one.why}`, wayRow);
}

const classRow = tableRow([
  { text: (one) => one.model, head: true },
  { text: (one) => (one.priority ? String(one.priority) : "default") },
  { text: (one) => rate(one.goodput_per_s), class: "n" },
  { text: (one) => share(one.late_share), class: "n" },
  { text: (one) => milliseconds(one.p50_ms), class: "n" },
  { text: (one) => milliseconds(one.p95_ms), class: "n" },
  { text: (one) => milliseconds(one.p99_ms), class: "n" },
]);

function sayClasses(classes) {
  keyed(byId("classes"), classes, (one) => `${one.priority} ${one.model}`, classRow);
}

function drawCharts() {
  if (timeline.paused) return;
  if (!charts.requests) {
    charts.requests = new TimeSeries(
      byId("chart-requests"),
      [
        { label: "in time", colour: "--well", fill: true },
        { label: "late", colour: "--warn", dash: "6 3" },
        { label: "failed", colour: "--bad", dash: "2 2" },
      ],
      { titledBy: "chart-requests-title" },
    );
    charts.latency = new TimeSeries(
      byId("chart-latency"),
      [
        { label: "p50", colour: "--one" },
        { label: "p95", colour: "--two", dash: "6 3" },
        { label: "p99", colour: "--three", dash: "2 2" },
      ],
      { titledBy: "chart-latency-title", log: true },
    );
  }
  const column = (place) => points.map((point) => point[place]);
  charts.requests.show([column(0), column(1), column(2), column(3)]);
  charts.latency.show([column(0), column(4), column(5), column(6)]);
  sayTable();
}

const pointRow = tableRow([
  { text: (one) => one.ago, head: true },
  ...["in_time", "late", "failed"].map((name) => ({ text: (one) => one[name].toFixed(1), class: "n" })),
  ...["p50", "p95", "p99"].map((name) => ({ text: (one) => milliseconds(one[name]), class: "n" })),
]);

function sayTable() {
  if (!byId("chart-table").open) return;
  const rows = [];
  for (let end = points.length, place = 0; end > 0 && place < TABLE_ROWS; end -= TABLE_EVERY, place += 1) {
    const part = points.slice(Math.max(0, end - TABLE_EVERY), end);
    const mean = (column) => part.reduce((sum, one) => sum + one[column], 0) / part.length;
    const worst = (column) => part.reduce((most, one) => (one[column] === null ? most : Math.max(most ?? 0, one[column])), null);
    rows.push({ ago: place ? `${place * TABLE_EVERY} s` : "now", in_time: mean(1), late: mean(2), failed: mean(3), p50: worst(4), p95: worst(5), p99: worst(6) });
  }
  keyed(byId("chart-rows"), rows, (one) => one.ago, pointRow);
}

byId("chart-table").addEventListener("toggle", sayTable);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const kept = keep(byId("key").value.trim());
  byId("key").value = "";
  if (kept) stream.follow();
  else onState("refused", "That is no key: it has characters that no key has. Copy it again.");
});

requests.follow(headers);
targets.follow(headers);
stream.follow();
