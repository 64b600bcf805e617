// What is only there at times: rollouts under way, and named conditions with their evidence.

import { byId, el, keyed, mark, say } from "./dom.js";
import { seconds, share } from "./words.js";

const GLYPH = { running: "▶", paused: "‖", succeeded: "●", returning: "◀", returned: "✕" };

export class Extras {
  show({ rollouts = [], conditions = [] }) {
    byId("rollouts-card").hidden = rollouts.length === 0;
    byId("conditions-card").hidden = conditions.length === 0;
    keyed(byId("rollouts"), rollouts, (one) => one.id, rollout);
    keyed(byId("conditions"), conditions, (one) => `${one.target} ${one.condition}`, condition);
  }
}

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

function condition() {
  const title = el("strong");
  const words = el("span");
  const node = el("li", {}, title, " ", words);
  return { node, update: (one) => { say(title, `${one.target}: ${one.condition}`); say(words, `for ${seconds(one.for_s)}; ${one.evidence}`); } };
}
