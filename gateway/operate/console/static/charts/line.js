// Lines as SVG path data: values become segments of pixels, with a gap wherever a value is missing.
//
// Each pixel column keeps at most four of its points: the first, the least, the greatest and the last. A line through
// those covers the same pixels as a line through all of them, so a path is bounded by the width and no peak is lost.
// Source: Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014.

// Segments of [x, y]; xOf(place) and yOf(value) place points, `from` is the first place drawn.
export function segments(values, xOf, yOf, from = 0) {
  const found = [];
  let segment = null;
  let column = null;
  const flush = () => {
    if (column) segment.push(...extremes(column.points));
    column = null;
  };
  for (let place = from; place < values.length; place += 1) {
    if (!Number.isFinite(values[place])) {
      flush();
      segment = null;
      continue;
    }
    if (!segment) found.push((segment = []));
    const point = [xOf(place), yOf(values[place])];
    const pixel = Math.floor(point[0]);
    if (column?.pixel !== pixel) {
      flush();
      column = { pixel, points: [] };
    }
    column.points.push(point);
  }
  flush();
  return found;
}

function extremes(points) {
  if (points.length <= 4) return points;
  const last = points.length - 1;
  let [least, greatest] = [0, 0];
  points.forEach(([, y], place) => {
    if (y < points[least][1]) least = place;
    if (y > points[greatest][1]) greatest = place;
  });
  const places = [...new Set([0, least, greatest, last])].sort((one, other) => one - other);
  return places.map((place) => points[place]);
}

const joined = (points) => points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

export const linePath = (found) => found.filter((one) => one.length > 1).map((one) => `M${joined(one)}`).join("");

// A point between two gaps has no line: its path has no length, and round caps make it a dot.
export const dotsPath = (found) => found.filter((one) => one.length === 1).map((one) => `M${joined(one)}h0`).join("");

export const areaPath = (found, bottom) =>
  found
    .filter((one) => one.length > 1)
    .map((one) => `M${one[0][0].toFixed(1)} ${bottom}L${joined(one)}L${one[one.length - 1][0].toFixed(1)} ${bottom}Z`)
    .join("");
