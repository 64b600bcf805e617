// Building and updating the page. Text only ever becomes text: names come from the network.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// el("td", {class: "n"}, "3 ms"): children are nodes or text, null ones are left out.
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return filled(node, attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return node;
}

// Only what changed is touched, so that a screen reader and a selection are left in peace.
export function say(node, words) {
  const text = words === null || words === undefined ? "" : String(words);
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// One child of `parent` per item, kept by key: make(item) returns {node, update(item)}. Focus stays where it is.
export function keyed(parent, items, keyOf, make) {
  const kept = parent.keyedRows ?? (parent.keyedRows = new Map());
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const wanted = new Set(items.map(keyOf));
  for (const [key, row] of kept) {
    if (!wanted.has(key)) {
      row.node.remove();
      kept.delete(key);
    }
  }
  items.forEach((item, place) => {
    const key = keyOf(item);
    let row = kept.get(key);
    if (!row) kept.set(key, (row = make(item)));
    row.update(item);
    if (parent.children[place] !== row.node) parent.insertBefore(row.node, parent.children[place] ?? null);
  });
  if (focused && focused.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

// A table row of plain cells: columns are {text(item), class?, title?(item)} or {node(item), update(node, item)}.
export function tableRow(columns) {
  return (item) => {
    const cells = columns.map((column) => {
      const cell = el(column.head ? "th" : "td", { class: column.class, scope: column.head ? "row" : null });
      if (column.node) cell.append(column.node(item));
      return cell;
    });
    const node = el("tr", {}, ...cells);
    const update = (now) => {
      columns.forEach((column, place) => {
        if (column.update) column.update(cells[place].firstChild, now, cells[place]);
        else say(cells[place], column.text(now));
        if (column.title) cells[place].title = column.title(now);
      });
    };
    return { node, update };
  };
}
