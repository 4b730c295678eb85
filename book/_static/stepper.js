// The collective stepper. Draws the programs of minitrain.collectives, step by step;
// the table PROGRAMS is printed from the library. A set of ranks is a number with a bit
// for each, so that to add is to unite two numbers.

const SIZE = { width: 720, height: 600, radius: 170, cell: 14 };

// What every rank holds before the first step, and after each.
function holdings(program) {
  const states = [program.held];
  for (const step of program.steps) {
    const before = states[states.length - 1];
    const after = before.map((row) => [...row]);
    for (const [source, to, chunks, add] of step)
      for (const chunk of chunks)
        after[to][chunk] = (add ? after[to][chunk] : 0) | before[source][chunk];
    states.push(after);
  }
  return states;
}

const count = (set) => set.toString(2).replaceAll("0", "").length;

// Chunks that the busiest rank has sent in the first so many steps.
function mostSent(program, done, ranks) {
  const sent = Array(ranks).fill(0);
  for (const step of program.steps.slice(0, done))
    for (const [source, , chunks] of step) sent[source] += chunks.length;
  return Math.max(...sent);
}

// The chunks worth showing of a rank: of an all-to-all those that are meant for it.
function shown(choice, program, rank) {
  const all = [...Array(program.chunks).keys()];
  return choice.collective === "all_to_all"
    ? all.filter((chunk) => chunk % choice.ranks === rank)
    : all;
}

const index = (choice, chunk) =>
  choice.collective === "all_to_all" ? Math.floor(chunk / choice.ranks) : chunk;

function label(choice, chunks) {
  if (choice.collective === "all_to_all")
    return chunks.map((c) => `${Math.floor(c / choice.ranks)}${c % choice.ranks}`).join(" ");
  return chunks.length > 4 ? `${chunks.length} chunks` : chunks.join(" ");
}

// Where a rank stands on the circle, and where something stands outside of it.
const place = (rank, ranks, right = 0, down = right) => {
  const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
  return [SIZE.width / 2 + (SIZE.radius + right) * Math.cos(angle),
    SIZE.height / 2 + (SIZE.radius + down) * Math.sin(angle)];
};

function strip(choice, program, held, rank) {
  const chunks = shown(choice, program, rank);
  const half = (chunks.length * SIZE.cell) / 2;
  const [x, y] = place(rank, choice.ranks, 40 + half, 60);
  const left = x - half;
  return chunks.map((chunk, i) => {
    const set = held[rank][chunk];
    const promised = program.promise[rank][chunk];
    const full = promised === null ? choice.ranks : count(promised);
    const height = set ? Math.max(3, (26 * Math.min(count(set), full)) / full) : 0;
    const done = promised !== null && set === promised;
    const at = left + i * SIZE.cell;
    return `<rect class="cell" x="${at}" y="${y - 13}" width="${SIZE.cell - 2}" height="26"/>` +
      `<rect class="${done ? "done" : "part"}" x="${at}" y="${y + 13 - height}" ` +
      `width="${SIZE.cell - 2}" height="${height}"/>` +
      `<text class="index" x="${at + SIZE.cell / 2 - 1}" y="${y + 23}">${index(choice, chunk)}</text>`;
  }).join("");
}

function arrow(choice, [source, to, chunks, add], step) {
  const [x1, y1] = place(source, choice.ranks);
  const [x2, y2] = place(to, choice.ranks);
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [dx, dy] = [(x2 - x1) / length, (y2 - y1) / length];
  const both = step.some((t) => t[0] === to && t[1] === source);
  const bend = both ? 16 : 0; // two that cross go side by side
  const [mx, my] = [(x1 + x2) / 2 - dy * bend * 2, (y1 + y2) / 2 + dx * bend * 2];
  const from = [x1 + dx * 24 - dy * bend * 0.7, y1 + dy * 24 + dx * bend * 0.7];
  const end = [x2 - dx * 27 - dy * bend * 0.7, y2 - dy * 27 + dx * bend * 0.7];
  const text = step.length > 16 ? "" :
    `<text class="chunks" x="${0.4 * from[0] + 0.6 * mx - dy * 9}" ` +
    `y="${0.4 * from[1] + 0.6 * my + dx * 9 + 4}">${label(choice, chunks)}</text>`;
  return `<path class="${add ? "adds" : "copies"}" marker-end="url(#tip)" ` +
    `d="M${from} Q${[mx, my]} ${end}"/>${text}`;
}

function picture(choice, program, at) {
  const held = holdings(program)[at];
  const step = program.steps[at] ?? [];
  const ranks = [...Array(choice.ranks).keys()];
  const nodes = ranks.map((rank) => {
    const [x, y] = place(rank, choice.ranks);
    return `<circle cx="${x}" cy="${y}" r="20"/><text class="rank" x="${x}" y="${y + 5}">${rank}</text>` +
      strip(choice, program, held, rank);
  });
  return `<svg viewBox="0 0 ${SIZE.width} ${SIZE.height}" role="img" aria-label="${words(choice, program, at)}">` +
    `<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">` +
    `<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>` +
    step.map((transfer) => arrow(choice, transfer, step)).join("") + nodes.join("") + "</svg>";
}

function words(choice, program, at) {
  const total = program.steps.length;
  const sent = mostSent(program, at, choice.ranks);
  const whole = choice.collective === "all_to_all" ? choice.ranks : program.chunks;
  const times = Number((sent / whole).toFixed(2));
  const so = `The busiest rank has sent ${sent} chunks, ${times} times its tensor.`;
  if (at === total) return `Done, after ${total} steps. ${so}`;
  const step = program.steps[at];
  const verb = step[0][3] ? "add" : "overwrite";
  const messages = step.length === 1 ? "1 message" : `${step.length} messages`;
  return `Step ${at} (there are ${total}): ${messages}, receivers ${verb}. ${so}`;
}

function list(choice, step) {
  return (step ?? []).map(([source, to, chunks, add]) =>
    `<li>${source} → ${to}: ${add ? "adds" : "copies"} ${label(choice, chunks)}</li>`).join("");
}

function options(select, names, chosen) {
  const value = names.includes(chosen) ? chosen : names[0];
  select.replaceChildren(...names.map((name) =>
    new Option(name.replaceAll("_", " "), name, name === value, name === value)));
}

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.stepper");
  if (!form) return;
  let at = 0;
  let clock = null;

  const choice = () => ({
    collective: form.collective.value,
    algorithm: form.algorithm.value,
    ranks: Number(form.ranks.value),
  });

  const stop = () => { clearInterval(clock); clock = null; form.play.textContent = "Play"; };

  const draw = () => {
    const chosen = choice();
    const program = PROGRAMS[chosen.collective][chosen.algorithm][chosen.ranks];
    form.back.disabled = at === 0;
    form.forward.disabled = at === program.steps.length;
    document.querySelector(".stepper-words").textContent = words(chosen, program, at);
    document.querySelector(".stepper-picture").innerHTML = picture(chosen, program, at);
    document.querySelector(".stepper-list").innerHTML = list(chosen, program.steps[at]);
  };

  const start = () => {
    stop();
    at = 0;
    options(form.algorithm, Object.keys(PROGRAMS[form.collective.value]), form.algorithm.value);
    const known = Object.keys(PROGRAMS[form.collective.value][form.algorithm.value]);
    options(form.ranks, known, form.ranks.value);
    draw();
  };

  const move = (by) => {
    const chosen = choice();
    const last = PROGRAMS[chosen.collective][chosen.algorithm][chosen.ranks].steps.length;
    at = Math.min(Math.max(at + by, 0), last);
    draw();
    if (at === last) stop();
  };

  const play = () => {
    if (clock) return stop();
    if (form.forward.disabled) at = 0;
    draw();
    form.play.textContent = "Pause";
    clock = setInterval(() => move(1), 1100);
  };

  options(form.collective, Object.keys(PROGRAMS), "all_reduce");
  options(form.algorithm, Object.keys(PROGRAMS.all_reduce), "ring");
  options(form.ranks, Object.keys(PROGRAMS.all_reduce.ring), "4");
  form.addEventListener("change", start);
  form.back.addEventListener("click", () => { stop(); move(-1); });
  form.forward.addEventListener("click", () => { stop(); move(1); });
  form.play.addEventListener("click", play);
  draw();
});
