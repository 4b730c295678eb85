// "Will it fit?" on one device. Draws what the library's closed forms say. The tables in capitals and
// the functions of minitrain.workload.moments are printed from the library.

const KINDS = ["parameters", "gradients", "optimizer state", "activations", "other"];

const WHEN = {
  "loss": "when the loss is differentiated",
  "head": "in the backward pass of the head",
  "last block": "in the backward pass of the last block",
  "first block": "in the backward pass of the first block",
  "embedding": "when the embedding is differentiated",
  "update": "when the optimizer steps",
};

function sizesOf(choice) {
  return {
    ...MODELS[choice.model],
    ...PRECISIONS[choice.precision],
    moment_bytes: OPTIMIZERS[choice.optimizer],
    seq: choice.seq,
    batch: choice.batch,
    recompute: choice.recompute ? 1 : 0,
    fused: 1,
    accumulating: choice.accumulating ? 1 : 0,
    scratch_bytes: 0,
  };
}

// Bytes of each kind at the step's highest moment.
function memoryOf(choice) {
  const step = sizesOf(choice);
  const [weights, state] = [weights_bytes(step), optimizer_bytes(step)];
  const all = moments(step).map(([gradients, activations, other], i) => {
    const kinds = [weights, gradients, state, activations, other];
    return { kinds, total: kinds.reduce((a, b) => a + b, 0), at: MOMENTS[i] };
  });
  return all.reduce((a, b) => (b.total > a.total ? b : a));
}

function read(form) {
  return {
    model: form.model.value,
    precision: form.precision.value,
    optimizer: form.optimizer.value,
    recompute: form.recompute.value === "yes",
    accumulating: form.accumulating.value === "yes",
    seq: 2 ** form.seq.value,
    batch: 2 ** form.batch.value,
    capacity: form.device.value * 2 ** 30,
  };
}

const gib = (bytes) =>
  (bytes / 2 ** 30).toLocaleString("en", { maximumFractionDigits: 1 }) + " GiB";

function draw(form) {
  const choice = read(form);
  form.seq.nextElementSibling.value = choice.seq.toLocaleString("en");
  form.batch.nextElementSibling.value = choice.batch;
  const { kinds, total, at } = memoryOf(choice);
  const scale = 100 / Math.max(total, choice.capacity);

  const bar = document.querySelector(".device-memory");
  bar.innerHTML = kinds
    .map((bytes, i) => `<span class="k${i + 1}" style="width: ${bytes * scale}%"></span>`)
    .join("") + `<i style="left: ${choice.capacity * scale}%"></i>`;
  const words = kinds.map((bytes, i) => `${KINDS[i]} ${gib(bytes)}`).join(", ");
  bar.setAttribute("aria-label", `Memory by kind: ${words}`);

  document.querySelector(".device-kinds").innerHTML = kinds
    .map((bytes, i) => `<tr><td><b class="k${i + 1}"></b>${KINDS[i]}</td>` +
      `<td>${gib(bytes)}</td><td>${Math.round((bytes / total) * 100)}%</td></tr>`)
    .join("");

  const fits = total <= choice.capacity;
  document.querySelector(".device-words").textContent = fits
    ? `It fits: ${gib(total)} of ${gib(choice.capacity)}, highest ${WHEN[at]}.`
    : `It does not fit: ${gib(total)}, ${(total / choice.capacity).toFixed(1)} times ` +
      `the device, highest ${WHEN[at]}.`;
}

function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name) =>
    new Option(name, name, name === chosen, name === chosen)));
}

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.device");
  if (!form) return;
  fill(form.model, Object.keys(MODELS), "llama3-8b");
  fill(form.precision, Object.keys(PRECISIONS), "bfloat16, float32 master");
  fill(form.optimizer, Object.keys(OPTIMIZERS), "AdamW");
  form.addEventListener("input", () => draw(form));
  draw(form);
});
