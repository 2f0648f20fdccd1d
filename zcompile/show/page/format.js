// Values as people read them, and elements.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

function amount(bytes) {
  let unit = 0;
  while (Math.abs(bytes) >= 999.5 && unit < UNITS.length - 1) { bytes /= 1000; unit += 1; }
  const digits = unit === 0 ? 0 : Math.max(0, 3 - String(Math.trunc(Math.abs(bytes))).length);
  return `${bytes.toFixed(digits)} ${UNITS[unit]}`;
}

function ms(value, unit = true) {
  const digits = Math.abs(value) >= 1000 ? 1 : 2;
  const text = value.toLocaleString("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  });
  return unit ? `${text}\u00a0ms` : text;
}

function percent(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)} %` : "0 %";
}

function shortType(name) {
  return name.replace("bfloat", "bf").replace("float", "fp");
}

function few(names, count = 1) {
  const more = names.length - count;
  return names.slice(0, count).join(", ") + (more > 0 ? ` +${more}` : "");
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** Plotly breaks lines only where it is told to. */
function wrapped(text, columns = 58) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const last = lines.length - 1;
    if (lines[last] && lines[last].length + word.length >= columns) lines.push(word);
    else lines[last] += (lines[last] ? " " : "") + word;
  }
  return lines.map(escaped).join("<br>");
}

/** el("p", {class: "note", onclick: f}, "text", child) */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
