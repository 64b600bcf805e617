// The timeline: a slider over the last five minutes. Away from its right end, the page shows the state at that instant.
//
// The gateway keeps a snapshot every few seconds; the slider's places are those instants, and the last place is now. A
// snapshot is fetched when the slider rests on it, and kept as long as the page is open.

import { byId, mark, say } from "./dom.js";
import { headers } from "./stream.js";
import { seconds } from "./words.js";

const KEPT = 60;
const REST_MS = 60;

const timeOf = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

export class Timeline {
  // on: {past(snapshot, at): show it, live(): show what is now}
  constructor(on) {
    this.on = on;
    this.instants = [];
    this.at = null; // the instant that is shown; null: now
    this.now = 0;
    this.known = new Map(); // snapshots by their instants
    this.slider = byId("timeline");
    this.slider.addEventListener("input", () => this.seek(this.instants[Number(this.slider.value)] ?? null));
    byId("timeline-live").addEventListener("click", () => {
      this.seek(null);
      this.slider.focus();
    });
    this.say();
  }

  get paused() {
    return this.at !== null;
  }

  // Of a new stream: what the gateway has kept.
  begin(instants) {
    this.instants = [...instants];
    this.say();
  }

  // Of each snapshot: the gateway's clock, and the newest instant that is kept.
  heard(now, newest) {
    this.now = now;
    const last = this.instants[this.instants.length - 1] ?? -Infinity;
    if (newest !== null && newest > last) this.instants.push(newest);
    while (this.instants.length > KEPT) {
      const [gone] = this.instants.splice(this.instants[0] === this.at ? 1 : 0, 1); // what is looked at stays
      this.known.delete(gone);
    }
    this.say();
  }

  seek(at) {
    if (at === this.at) return;
    this.at = at;
    mark(document.body, "time", at === null ? "now" : "past");
    clearTimeout(this.resting);
    if (at === null) this.on.live();
    else if (this.known.has(at)) this.on.past(this.known.get(at), at);
    else this.resting = setTimeout(() => this.fetch(at), REST_MS);
    this.say();
  }

  async fetch(at) {
    try {
      const response = await fetch(`/console/moment?at=${at}`, { headers: headers() });
      if (response.ok) this.known.set(at, await response.json());
      this.missing = !response.ok;
    } catch {
      this.missing = true;
    }
    if (this.at !== at) return; // it was moved on meanwhile
    if (this.missing) say(byId("timeline-words"), `Paused at ${timeOf(at)}: the gateway does not keep it any more`);
    else this.on.past(this.known.get(at), at);
  }

  say() {
    const last = this.instants.length;
    const place = this.paused ? Math.max(0, this.instants.indexOf(this.at)) : last;
    const ago = this.paused ? Math.max(0, this.now - this.at) : 0;
    const words = this.paused ? `Paused at ${timeOf(this.at)}` : "Live";
    this.slider.max = last;
    if (Number(this.slider.value) !== place) this.slider.value = place;
    this.slider.disabled = last === 0;
    say(byId("timeline-words"), words);
    say(byId("timeline-ago"), this.paused ? `${seconds(ago)} ago` : last ? `the last ${seconds(this.now - this.instants[0])} are kept` : "nothing is kept yet");
    byId("timeline-live").hidden = !this.paused;
    // Said when it moves, and not each second: words that change all the time are never read to their end.
    const told = this.paused ? `paused at ${timeOf(this.at)}` : "live, now";
    if (this.slider.getAttribute("aria-valuetext") !== told) this.slider.setAttribute("aria-valuetext", told);
  }
}
