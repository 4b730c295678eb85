// "Will it fit?" on a cluster. Draws what the library's closed forms say: LAYOUT, with
// tables in capitals and functions of minitrain.simulate, is printed from the library.

// The record that `minitrain.simulate.estimate.sizes` makes, of a dense model.
function sizesOfLayout(choice) {
  const model = LAYOUT.MODELS[choice.model];
  const [pp, tp] = [choice.pp, choice.tp];
  const [most, least] = [Math.ceil(model.layers / pp), Math.floor(model.layers / pp)];
  const block = model.block_parameters / tp;
  const table = (model.vocab * model.hidden) / tp;
  const bothEnds = pp === 1 || choice.schedule === "zb-v"; // on one rank
  const tables = bothEnds && model.tables > 1 ? 2 * table : table;
  const device = LAYOUT.DEVICES[choice.device];
  return {
    ...model,
    seq: choice.seq,
    micro_batch: choice.micro_batch,
    micro_batches: choice.global_batch / (choice.dp * choice.micro_batch),
    tp, pp, dp: choice.dp, cp: choice.cp,
    sp: choice.sequence_parallel,
    zero: choice.zero,
    shard_ranks: choice.dp * choice.cp,
    interleave: choice.interleave,
    schedule: LAYOUT.SCHEDULES.indexOf(choice.schedule),
    first_layers: most,
    last_layers: least,
    stage_layers: most,
    recompute_full: choice.recompute === "full" ? 1 : 0,
    recompute_core: choice.recompute === "selective" ? 1 : 0,
    block_parameters: block,
    stage_parameters: most * block + tables,
    hosts: choice.devices / Math.min(device.per_host, choice.devices),
  };
}

// What `Plan.check` refuses, in its words; nothing if the layout can be run.
function refusal(choice) {
  const model = LAYOUT.MODELS[choice.model];
  const { devices, tp, pp, cp, dp, interleave } = choice;
  const used = tp * pp * cp * dp;
  if (used !== devices)
    return `tp*pp*cp*dp = ${tp}*${pp}*${cp}*${dp} = ${used} devices, and the cluster ` +
      `has ${devices}`;
  const broken = [];
  for (const name of ["heads", "ffn"])
    if (model[name] % tp) broken.push(`tp=${tp} does not divide ${name}=${model[name]}`);
  const kv = model.kv_heads;
  if (kv % tp && tp % kv)
    broken.push(`tp=${tp} and kv_heads=${kv} do not divide one another`);
  if (choice.seq % (cp > 1 ? 2 * cp : 1))
    broken.push(`seq=${choice.seq} is not a multiple of 2*cp=${2 * cp}`);
  if (choice.sequence_parallel && choice.seq % (tp * cp))
    broken.push(`tp*cp=${tp * cp} does not divide seq=${choice.seq}`);
  if (model.layers < pp) broken.push(`pp=${pp} stages of ${model.layers} layers`);
  if (interleave > 1 && pp === 1)
    broken.push(`interleave=${interleave} needs more than one stage`);
  const most = Math.ceil(model.layers / pp);
  if (interleave > most)
    broken.push(`interleave=${interleave} chunks of ${most} layers`);
  if (broken.length) return broken.join("; ");
  const share = dp * choice.micro_batch;
  if (choice.global_batch % share)
    return `global_batch=${choice.global_batch} is not a multiple of dp*micro_batch = ` +
      `${dp}*${choice.micro_batch} = ${share}`;
  const known = LAYOUT.DEVICES[choice.device].precisions;
  if (!known.includes(choice.precision))
    return `${choice.device} has no ${choice.precision}; it has ${known.join(", ")}`;
  return "";
}

// The same numbers as `minitrain.simulate.estimate.estimate`.
function predict(choice) {
  const refused = refusal(choice);
  if (refused) return { refused };
  const device = LAYOUT.DEVICES[choice.device];
  const name = `${choice.device} ${choice.precision} ${choice.software}`;
  const { c, w, n, soft, interval } = LAYOUT.RECORDS[name];
  const here = Math.min(device.per_host, choice.devices);
  const reach = device.scale_up_hosts ? choice.devices : here;
  const links = { ...n, domain_ranks: Math.min(device.scale_up_ranks, reach) };
  const s = sizesOfLayout(choice);
  const parts = LAYOUT.step_seconds(s, c, w, links, soft);
  const kinds = LAYOUT.rank_bytes(s, soft);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const [step, held] = [sum(parts), sum(kinds)];
  const tokens = choice.global_batch * choice.seq;
  const matrices = s.layers * LAYOUT.block_matrices(
    s.hidden, s.heads, s.kv_heads, s.head_dim, s.ffn, s.gated);
  const flops = 3 * (
    LAYOUT.matmul_flops(tokens, matrices + s.hidden * s.vocab) +
    s.layers * LAYOUT.attention_flops(choice.global_batch, choice.seq, s.heads, s.head_dim)
  );
  return {
    parts, kinds, step_seconds: step, memory_bytes: held,
    interval: interval.map((share) => share * step),
    mfu: flops / (step * choice.devices * device.peak_flops),
    tokens_per_second: tokens / step,
    micro_batches: s.micro_batches,
    capacity: device.memory_bytes,
    fits: held <= (1 - LAYOUT.GUARD) * device.memory_bytes,
  };
}

function readLayout(form) {
  const power = (name) => 2 ** form[name].value;
  const chosen = (name) => form[name].value;
  const [devices, tp, pp, cp] = [power("devices"), power("tp"), power("pp"), power("cp")];
  const [schedule, chunks] = chosen("schedule").split(" x");
  const pipelined = pp > 1;
  return {
    model: chosen("model"), device: chosen("device"), devices, tp, pp, cp,
    dp: Number(chosen("dp")) < 0 ? Math.max(devices / (tp * pp * cp), 1) : power("dp"),
    micro_batch: power("micro_batch"), seq: power("seq"),
    global_batch: power("global_batch"),
    schedule: pipelined ? schedule : "1f1b", interleave: pipelined ? Number(chunks ?? 1) : 1,
    sequence_parallel: tp > 1 ? Number(chosen("sequence_parallel")) : 0,
    zero: Number(chosen("zero")), recompute: chosen("recompute"),
    precision: chosen("precision"), software: chosen("software"),
  };
}

const memoryText = (bytes) =>
  (bytes / 2 ** 30).toLocaleString("en", { maximumFractionDigits: 1 }) + " GiB";

function secondsText(seconds) {
  if (seconds === 0) return "0";
  const [count, unit] = seconds >= 1 ? [seconds, "s"] : [seconds * 1e3, "ms"];
  const digits = count < 10 ? 2 : count < 100 ? 1 : 0;
  const places = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return count.toLocaleString("en", places) + " " + unit;
}

const percent = (share) => (100 * share).toFixed(1) + "%";

function drawMemory(made) {
  const scale = 100 / Math.max(made.memory_bytes, made.capacity);
  const bar = document.querySelector(".layout-memory");
  bar.innerHTML = made.kinds
    .map((b, i) => `<span class="k${i + 1}" style="width: ${b * scale}%"></span>`)
    .join("") + `<i style="left: ${made.capacity * scale}%"></i>`;
  const words = made.kinds.map((b, i) => `${LAYOUT.KINDS[i]} ${memoryText(b)}`);
  bar.setAttribute("aria-label", `Memory by kind: ${words.join(", ")}`);
  document.querySelector(".layout-kinds").innerHTML = made.kinds
    .map((b, i) => `<tr><td><b class="k${i + 1}"></b>${LAYOUT.KINDS[i]}</td>` +
      `<td>${memoryText(b)}</td><td>${percent(b / made.memory_bytes)}</td></tr>`)
    .join("");
}

function drawTime(made) {
  const largest = Math.max(...made.parts);
  document.querySelector(".layout-parts").innerHTML = made.parts
    .map((seconds, i) => {
      const width = (100 * Math.max(seconds, 0)) / largest;
      const share = percent(seconds / made.step_seconds);
      return `<tr><td>${LAYOUT.PARTS[i]}</td><td>${secondsText(seconds)}</td>` +
        `<td>${share}</td><td><s style="width: ${width}%"></s></td></tr>`;
    })
    .join("");
}

function wordsOf(choice, made) {
  if (made.refused) return `This cannot be run: ${made.refused}.`;
  const held = `${memoryText(made.memory_bytes)} of ${memoryText(made.capacity)}`;
  const verdict = made.fits ? `It fits: ${held}` : `It does not fit: ${held}`;
  const [low, high] = made.interval.map(secondsText);
  const rate = Math.round(made.tokens_per_second).toLocaleString("en");
  const batches = made.micro_batches.toLocaleString("en");
  return `${verdict} on the fullest rank. A step of ${batches} micro-batches takes ` +
    `${secondsText(made.step_seconds)} (${low} to ${high}): ` +
    `${rate} tokens a second, MFU ${percent(made.mfu)}.`;
}

function drawLayout(form) {
  const choice = readLayout(form);
  const made = predict(choice);
  for (const name of ["devices", "tp", "pp", "cp", "seq", "micro_batch", "global_batch"])
    form[name].nextElementSibling.value = choice[name].toLocaleString("en");
  const rest = Number(form.dp.value) < 0;
  form.dp.nextElementSibling.value = choice.dp.toLocaleString("en") + (rest ? " (rest)" : "");
  form.schedule.disabled = choice.pp === 1;
  form.sequence_parallel.disabled = choice.tp === 1;
  document.querySelector(".layout-words").textContent = wordsOf(choice, made);
  document.querySelector(".layout-said").hidden = Boolean(made.refused);
  if (made.refused) return;
  drawMemory(made);
  drawTime(made);
}

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.layout");
  if (!form) return;
  const options = (select, names, chosen) => select.replaceChildren(
    ...names.map((name) => new Option(name, name, name === chosen, name === chosen)));
  options(form.model, Object.keys(LAYOUT.MODELS), "llama3-70b");
  options(form.device, Object.keys(LAYOUT.DEVICES), "H100");
  options(form.precision, LAYOUT.PRECISIONS, "bf16");
  options(form.software, LAYOUT.FRAMEWORKS, "megatron-core");
  form.addEventListener("input", () => drawLayout(form));
  drawLayout(form);
});
