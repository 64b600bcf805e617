// Scales map values to pixels, and ticks are the round values that an axis names.
//
// A scale is {low, high, place(value), value(pixel)}: `low` lies at pixel `from` and `high` at pixel `to`.

const ROUND = [1, 2, 5, 10];
const ROUND_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];
const NEARLY = 1e-9; // of a step: what division loses

export function linear(low, high, from, to) {
  const pixels = (to - from) / (high - low || 1);
  return { low, high, place: (value) => from + (value - low) * pixels, value: (pixel) => low + (pixel - from) / pixels };
}

// Values below `low` lie at `low`: zero has no logarithm.
export function logarithmic(low, high, from, to) {
  const powers = linear(Math.log10(low), Math.log10(high), from, to);
  return { low, high, place: (value) => powers.place(Math.log10(Math.max(value, low))), value: (pixel) => 10 ** powers.value(pixel) };
}

// About `most` ticks, never more than one above.
export function linearTicks({ low, high }, most) {
  const least = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(least));
  return multiples(ROUND.find((one) => one * power >= least * (1 - NEARLY)) * power, low, high);
}

// 1, 2 and 5 of each power of ten where there is room, else only the powers.
export function logarithmicTicks({ low, high }, most) {
  const within = (ticks) => ticks.filter((tick) => tick >= low && tick <= high);
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) powers.push(10 ** power);
  const ticks = within(powers.flatMap((power) => [power, 2 * power, 5 * power]));
  if (ticks.length < 2) return linearTicks({ low, high }, most); // all of it lies between two of them
  if (ticks.length <= most) return ticks;
  const step = Math.ceil(within(powers).length / most);
  return within(powers).filter((_, place) => place % step === 0);
}

// Whole seconds, minutes or hours, from UTC seconds.
export function timeTicks({ low, high }, most) {
  const least = (high - low) / most;
  const step = ROUND_S.find((one) => one >= least) ?? 3600 * Math.ceil(least / 3600);
  return multiples(step, low, high);
}

function multiples(step, low, high) {
  const first = Math.ceil(low / step - NEARLY);
  const last = Math.floor(high / step + NEARLY);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => (first + place) * step);
}
