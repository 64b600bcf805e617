// Server-sent events over fetch, which unlike EventSource can show a key. It asks again when it ends, soon at first.

const KEY = "tidegate-key";
const FIRST_MS = 500;
const LONGEST_MS = 5000;
const SILENT_MS = 5000; // a snapshot comes every second

export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

// Whether it was kept. A header holds no other characters: `fetch` would fail with such a key for as long as the tab lives.
export const keep = (key) => {
  const isOne = /^[\x21-\x7e]+$/.test(key);
  if (isOne) sessionStorage.setItem(KEY, key);
  return isOne;
};

export class Stream {
  // on: {event(name, contents), state("live" | "lost" | "refused", words)}
  constructor(on) {
    this.on = on;
    this.target = "";
    this.running = 0;
    this.pauseMs = FIRST_MS;
  }

  // Follow, with everything of one target where `target` names it. Whatever was followed before ends.
  async follow(target = this.target) {
    this.target = target;
    this.abort?.abort();
    const run = ++this.running;
    while (run === this.running) {
      const refused = await this.once(run);
      if (refused || run !== this.running) return;
      await new Promise((done) => setTimeout(done, this.pauseMs));
      this.pauseMs = Math.min(LONGEST_MS, 2 * this.pauseMs);
    }
  }

  async once(run) {
    const abort = (this.abort = new AbortController());
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      heard();
      const query = this.target ? `?target=${encodeURIComponent(this.target)}` : "";
      const response = await fetch(`/console/live${query}`, { headers: headers(), signal: abort.signal });
      if (response.status === 401 || response.status === 403) {
        this.on.state("refused", response.status === 401 ? "No key was shown, or one that is not known." : "This key has no right to look.");
        return true;
      }
      if (!response.ok) throw new Error(`the gateway answers ${response.status}`);
      this.pauseMs = FIRST_MS;
      this.on.state("live", "");
      await this.read(response.body, heard, run);
    } catch (error) {
      if (run === this.running) this.on.state("lost", String(error.message ?? error));
    } finally {
      clearTimeout(watchdog);
    }
    return false;
  }

  async read(body, heard, run) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done || run !== this.running) return;
      heard();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.tell(event);
    }
  }

  tell(event) {
    const [first, second] = event.split("\n");
    this.on.event(first.slice("event: ".length), JSON.parse(second.slice("data: ".length)));
  }
}
