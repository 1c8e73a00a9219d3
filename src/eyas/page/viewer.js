// Steps through the rounds of one answer: the text coloured by where each token came from, and the round's draft tree.
// Reads the answers from the page itself; asks for nothing outside it.
"use strict";

const ANSWERS = JSON.parse(document.getElementById("answers").textContent);
const ORIGINS = { first: "#e5e7eb", bonus: "#fcdcb8" };
const DEPTHS = ["#d5f0e2", "#aee0c8", "#86cfad", "#5fbd93", "#3fa97c", "#2b9468"]; // accepted drafts, from depth 1 on
const COLUMN = 132, ROW = 28, BOX = 112, TALL = 22;

let answer = null; // the one that is shown
let shown = 0; // the number of its round

const at = (id) => document.getElementById(id);
const depthColour = (depth) => DEPTHS[Math.min(depth, DEPTHS.length) - 1];
const percent = (share) => (share >= 0.995 || share < 0.0005 ? Math.round(100 * share) : (100 * share).toPrecision(2)) + "%";

function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
}

function make(parent, name, attributes, text) {
  const svg = name === "svg" || parent.namespaceURI === "http://www.w3.org/2000/svg";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

// What a round delivered, token by token: "first" (the prompt's own forward), a depth (an accepted draft) or "bonus".
function origins(round) {
  if (round.tokens === null) return round.delivered.map(() => "first");
  return round.delivered.map((_, i) => (i + 1 < round.path.length ? i + 1 : "bonus"));
}

function originName(origin) {
  if (origin === "first") return "from the prompt's own forward";
  return origin === "bonus" ? "the target's own token (bonus)" : `draft of depth ${origin}, accepted`;
}

function drawText() {
  const box = at("text");
  box.replaceChildren();
  answer.rounds.forEach((round, number) => {
    origins(round).forEach((origin, i) => {
      const colour = ORIGINS[origin] || depthColour(origin);
      const span = make(box, "span", { style: `background:${colour}`, title: `round ${number}: ${originName(origin)}` });
      span.textContent = answer.texts[round.delivered[i]];
      span.className = number === shown ? "now" : number > shown ? "later" : "";
      span.addEventListener("click", () => show(number));
    });
  });
  const now = box.querySelector(".now");
  if (now) box.scrollTop = now.offsetTop - box.offsetTop - box.clientHeight / 2;
}

// Nodes with their places: depth to the right, leaves one below the other. The bonus token hangs below the path's end.
function layout(round) {
  const nodes = round.tokens.map((token, i) => ({
    token, parent: round.parents[i], value: round.values[i], kind: i === 0 ? "root" : round.path.includes(i) ? "accepted" : "rejected",
  }));
  if (round.delivered.length === round.path.length) {
    const end = round.path[round.path.length - 1];
    nodes.push({ token: round.delivered[round.delivered.length - 1], parent: end, value: null, kind: "bonus" });
  }
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (i > 0) children[node.parent].push(i); });
  let leaves = 0;
  const place = (i, depth) => {
    nodes[i].x = 4 + depth * COLUMN;
    children[i].forEach((child) => place(child, depth + 1));
    const first = children[i][0], last = children[i][children[i].length - 1];
    nodes[i].y = children[i].length ? (nodes[first].y + nodes[last].y) / 2 : 4 + ROW * leaves++;
  };
  place(0, 0);
  return { nodes, width: 8 + COLUMN * Math.max(...nodes.map((n) => n.x / COLUMN + 1)), height: 8 + ROW * leaves };
}

const LOOKS = {
  root: { stroke: "#6b7280", fill: "#f3f4f6", ink: "#1f2933" },
  accepted: { stroke: "#0f8a5f", fill: "#dcf3e7", ink: "#1f2933" },
  rejected: { stroke: "#d1d5db", fill: "#ffffff", ink: "#6b7280" },
  bonus: { stroke: "#c2620a", fill: "#fcdcb8", ink: "#1f2933" },
};

function drawTree() {
  const box = at("tree"), round = answer.rounds[shown];
  box.replaceChildren();
  if (round.tokens === null) {
    make(box, "p", { class: "faint" }, "The prompt's own forward: it has no draft tree and yields the first token.");
    return;
  }
  const { nodes, width, height } = layout(round);
  const svg = make(box, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "draft tree" });
  for (const node of nodes.slice(1)) {
    const from = nodes[node.parent], x1 = from.x + BOX, y1 = from.y + TALL / 2, x2 = node.x, y2 = node.y + TALL / 2;
    const on = node.kind !== "rejected", look = LOOKS[node.kind];
    make(svg, "path", {
      d: `M${x1},${y1} C${x1 + 12},${y1} ${x2 - 12},${y2} ${x2},${y2}`, fill: "none", stroke: look.stroke,
      "stroke-width": on ? 2.5 : 1, "stroke-dasharray": node.kind === "bonus" ? "4 3" : "none",
    });
  }
  for (const node of nodes) {
    const look = LOOKS[node.kind], group = make(svg, "g", { class: `node ${node.kind}` });
    const confidence = node.value === null || node.parent < 0 ? null : node.value / (nodes[node.parent].value || 1);
    make(group, "rect", {
      x: node.x, y: node.y, width: BOX, height: TALL, rx: 5, fill: look.fill, stroke: look.stroke,
      "stroke-width": node.kind === "rejected" ? 1 : 1.5, "stroke-dasharray": node.kind === "bonus" ? "4 3" : "none",
    });
    const text = visible(answer.texts[node.token]), room = confidence === null ? 13 : 9;
    const label = text.length > room ? text.slice(0, room - 1) + "…" : text;
    make(group, "text", { x: node.x + 7, y: node.y + 15, "font-size": 12, fill: look.ink }, label);
    if (confidence !== null) {
      make(group, "text", { x: node.x + BOX - 6, y: node.y + 15, "font-size": 11, fill: look.ink, "text-anchor": "end" }, percent(Math.min(confidence, 1)));
    }
    const about = confidence === null ? "" : `\nconfidence ${percent(Math.min(confidence, 1))}, of the whole path ${percent(node.value)}`;
    make(group, "title", {}, `${JSON.stringify(answer.texts[node.token])}, token ${node.token}: ${node.kind}${about}`);
  }
}

function describe(round) {
  if (round.tokens === null) return `Round 0 of ${answer.rounds.length - 1}: the prompt`;
  const drafted = round.tokens.length - 1, accepted = round.path.length - 1;
  return `Round ${shown} of ${answer.rounds.length - 1}: ${drafted} drafted, ${accepted} accepted, ${round.delivered.length} delivered`;
}

function show(number) {
  shown = Math.max(0, Math.min(number, answer.rounds.length - 1));
  at("round").value = shown;
  at("what").textContent = describe(answer.rounds[shown]);
  drawText();
  drawTree();
}

function choose(number) {
  answer = ANSWERS[number];
  at("prompt").textContent = answer.prompt;
  at("round").max = answer.rounds.length - 1;
  show(Math.min(1, answer.rounds.length - 1));
}

function drawLegend() {
  const items = [[ORIGINS.first, "first token, from the prompt's forward"], [ORIGINS.bonus, "bonus: the target's own token"]];
  const deepest = Math.max(...ANSWERS.flatMap((own) => own.rounds.map((round) => round.path.length - 1)));
  DEPTHS.slice(0, deepest).forEach((colour, i) => items.push([colour, `draft, depth ${i + 1}${i + 1 < DEPTHS.length ? "" : " or more"}`]));
  for (const [colour, name] of items) {
    const item = make(at("origins"), "li", {});
    make(item, "span", { class: "swatch", style: `background:${colour}` });
    item.append(name);
  }
}

ANSWERS.forEach((own, i) => make(at("answer"), "option", { value: i }, `${own.id}${own.turn ? `, turn ${own.turn + 1}` : ""}, T=${own.temperature}: ${own.label}`));
at("answer").addEventListener("change", (event) => choose(Number(event.target.value)));
at("round").addEventListener("input", (event) => show(Number(event.target.value)));
at("back").addEventListener("click", () => show(shown - 1));
at("next").addEventListener("click", () => show(shown + 1));
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select")) return;
  if (event.key === "ArrowLeft") show(shown - 1);
  if (event.key === "ArrowRight") show(shown + 1);
});
drawLegend();
choose(0);
