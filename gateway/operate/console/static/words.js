// Numbers and states in words.

export const HEALTH = {
  well: { glyph: "●", words: "well" },
  slow: { glyph: "◆", words: "slow" },
  silent: { glyph: "◌", words: "silent" },
  suspect: { glyph: "▲", words: "in doubt" },
  down: { glyph: "✕", words: "down" },
};

export const STATE = {
  well: { glyph: "●", words: "Well" },
  attention: { glyph: "▲", words: "Look at this" },
  trouble: { glyph: "✕", words: "Trouble" },
  lost: { glyph: "◌", words: "No word" },
};

export const milliseconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
};

export const rate = (value) => (value === 0 ? "0/s" : value >= 100 ? `${Math.round(value)}/s` : `${value.toFixed(1)}/s`);

export const share = (value) => (value === 0 ? "0 %" : value < 0.1 ? `${(100 * value).toFixed(1)} %` : `${Math.round(100 * value)} %`);

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 90) return `${Math.round(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
};

// Of a request, as `/debug/decisions` tells it: where it went, in vain or not, and why it went there or how it ended.
export const wentTo = (one) => one.end.served_by ?? ([...new Set(one.tried)].join(", ") || "nowhere");
export const because = (one) => [one.end.reason ?? one.ended, one.end.hedged && "hedged", one.end.fallback && "fallback", one.end.degraded && "degraded"].filter(Boolean).join(", ");

// Of a generation, as `/debug/decisions` tells it; "" of any other request. The first token is the prompt's time.
export const tokensOf = (tokens) => {
  if (!tokens) return "";
  const cached = tokens.cached ? ` (${tokens.cached} from a cache)` : "";
  const speed = tokens.completion > 1 && tokens.decode_ms > 0 ? `, then ${rate((1000 * (tokens.completion - 1)) / tokens.decode_ms)}` : "";
  const why = { stop: "the model ended it", length: "it reached its limit" }[tokens.finish_reason] ?? tokens.finish_reason;
  return `${tokens.prompt} tokens in${cached}, ${tokens.completion} out; computed: the first after ${milliseconds(tokens.prefill_ms)}${speed}; ${why}.`;
};
