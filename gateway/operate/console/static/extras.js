// What is only there at times: models and where they are in memory, those that generate, rollouts under way, versions on trial, devices whose answers are compared, and named conditions with their evidence.

import { byId, el, keyed, mark, say, tableRow } from "./dom.js";
import { milliseconds, rate, seconds, share } from "./words.js";

const GLYPH = { running: "▶", paused: "‖", succeeded: "●", returning: "◀", returned: "✕" };

export class Extras {
  show({ generations = [], models = [], rollouts = [], conditions = [], trials = [], agreement = [] }) {
    byId("models-card").hidden = models.length === 0;
    keyed(byId("models"), models, (one) => `${one.model} ${one.version}`, modelRow);
    byId("generations-card").hidden = generations.length === 0;
    keyed(byId("generations"), generations, (one) => one.model, generation);
    byId("rollouts-card").hidden = rollouts.length === 0;
    byId("trials-card").hidden = trials.length === 0;
    byId("agreement-card").hidden = agreement.length === 0;
    byId("conditions-card").hidden = conditions.length === 0;
    keyed(byId("rollouts"), rollouts, (one) => one.id, rollout);
    keyed(byId("trials"), trials.flatMap(sides), (one) => `${one.model} ${one.role}`, side);
    keyed(byId("agreement"), agreement, (one) => `${one.target} ${one.model} ${one.version} ${one.variant}`, compared);
    keyed(byId("conditions"), conditions, (one) => `${one.target} ${one.condition}`, condition);
  }
}

const generation = tableRow([
  { text: (one) => one.model, head: true },
  { text: (one) => String(one.under_way), class: "n" },
  { text: (one) => rate(one.out_per_s), class: "n" },
  { text: (one) => rate(one.in_per_s), class: "n" },
  { text: (one) => milliseconds(one.first_p50_ms), class: "n" },
  { text: (one) => milliseconds(one.first_p95_ms), class: "n" },
]);

const modelRow = tableRow([
  { text: (one) => `${one.model} ${one.version}`, head: true },
  { text: (one) => String(one.ready), class: "n" },
  { text: (one) => (one.cold ? `${one.cold}${one.cold_s ? `, ${seconds(one.cold_s)} to load` : ""}` : "0"), class: "n" },
  { text: (one) => String(one.coming), class: "n" },
  { text: (one) => String(one.bad), class: "n" },
  { text: (one) => one.variants.join(", ") },
]);

function rollout(first) {
  const title = el("strong");
  const words = el("span");
  const bar = el("progress", { max: "1" });
  const node = el("li", {}, title, bar, words);
  const update = (one) => {
    const steps = Object.entries(one.steps).map(([step, count]) => `${count} ${step}`).join(", ");
    mark(node, "phase", one.phase);
    say(title, `${GLYPH[one.phase] ?? "●"} ${one.model} ${one.version}`);
    bar.value = one.done_share;
    bar.setAttribute("aria-label", `rollout of ${first.model} ${first.version}: ${share(one.done_share)} of its devices`);
    say(words, `${one.phase}, wave ${one.wave} of ${one.waves}, ${one.devices} devices (${steps})${one.reason ? `: ${one.reason}` : ""}`);
  };
  return { node, update };
}

// Both versions of a trial, one row each. Agreement is about both, so it stands with the one that is on trial.
const sides = (trial) =>
  ["standing", "candidate"].map((role) => ({
    ...trial.figures[trial[role]],
    model: trial.model,
    version: trial[role],
    role,
    tenants: role === "candidate" ? trial.tenants : 0,
    share: role === "candidate" ? trial.share : 1 - trial.share,
    agreement: role === "candidate" ? trial.agreement : null,
  }));

const side = tableRow([
  { text: (one) => `${one.model} ${one.version}`, head: true },
  { text: (one) => one.role },
  { text: (one) => `${share(one.share)}${one.tenants ? ` and ${one.tenants} tenant${one.tenants === 1 ? "" : "s"}` : ""}`, class: "n" },
  { text: (one) => String(one.asked), class: "n" },
  { text: (one) => (one.in_time_ratio === null ? "–" : share(one.in_time_ratio)), class: "n", title: (one) => (one.in_time_95 ? `with 95 % confidence from ${share(one.in_time_95[0])} to ${share(one.in_time_95[1])}` : "") },
  { text: (one) => milliseconds(one.ms.p50), class: "n" },
  { text: (one) => milliseconds(one.ms.p95), class: "n" },
  { text: (one) => String(one.failed), class: "n", title: (one) => Object.entries(one.failures).map(([code, count]) => `${count} ${code}`).join(", ") },
  { text: (one) => (one.agreement && one.agreement.ratio !== null ? `${share(one.agreement.ratio)} of ${one.agreement.rows}` : "–"), class: "n" },
]);

const METRIC = { cosine: "cosine", top1: "top class", tokens: "greedy tokens" };

// The report has disagreements; a tenth of a percent matters, as two precisions of one model are that near.
const agreed = (disagreement) => (disagreement === null ? "–" : `${(100 * (1 - disagreement)).toFixed(1)} %`);

const standing = (one) => {
  if (one.drifting_for_s === null) return "● agrees";
  const what = one.demoted ? "✕ demoted" : "▲ drifts, not demoted";
  const back = one.agreed_in_a_row ? `, ${one.agreed_in_a_row} agree again` : "";
  return `${what}, for ${seconds(one.drifting_for_s)}${back}`;
};

const compared = tableRow([
  { text: (one) => one.target, head: true },
  { text: (one) => `${one.model} ${one.version} ${one.variant}` },
  { text: (one) => METRIC[one.metric] ?? one.metric },
  { text: (one) => agreed(one.recorded), class: "n" },
  { text: (one) => agreed(one.recent_mean), class: "n", title: (one) => `since the start ${agreed(one.mean)}` },
  { text: (one) => agreed(one.limit), class: "n" },
  { text: (one) => String(one.compared), class: "n" },
  { text: standing, title: (one) => one.why },
]);

function condition() {
  const title = el("strong");
  const words = el("span");
  const node = el("li", {}, title, " ", words);
  return { node, update: (one) => { say(title, `${one.target}: ${one.condition}`); say(words, `for ${seconds(one.for_s)}; ${one.evidence}`); } };
}
