// "Will it fit?" Draws what the library's closed forms say. The functions and tables in
// capitals (MODELS, PRECISIONS, OPTIMIZERS, fit) are printed from minitrain.

const KINDS = ["parameters", "gradients", "optimizer state", "activations", "other"];

function arguments_of(choice) {
  return [
    ...Object.values(MODELS[choice.model]),
    choice.seq,
    choice.batch,
    ...Object.values(PRECISIONS[choice.precision]),
    OPTIMIZERS[choice.optimizer],
    choice.recompute ? 1 : 0,
  ];
}

// Bytes of each kind at the higher of the step's two moments.
function memoryOf(choice) {
  const [weights, gradients, state, activations, atLoss, atUpdate] =
    fit(...arguments_of(choice));
  const loss = [weights, 0, state, activations, atLoss];
  const update = [weights, gradients, state, 0, atUpdate];
  const sum = (kinds) => kinds.reduce((a, b) => a + b, 0);
  const higher = sum(loss) >= sum(update) ? loss : update;
  return { kinds: higher, total: sum(higher), at: higher === loss ? "loss" : "update" };
}

function read(form) {
  return {
    model: form.model.value,
    precision: form.precision.value,
    optimizer: form.optimizer.value,
    recompute: form.recompute.value === "yes",
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

  const bar = document.querySelector(".fit-bar");
  bar.innerHTML = kinds
    .map((bytes, i) => `<span class="k${i + 1}" style="width: ${bytes * scale}%"></span>`)
    .join("") + `<i style="left: ${choice.capacity * scale}%"></i>`;
  const words = kinds.map((bytes, i) => `${KINDS[i]} ${gib(bytes)}`).join(", ");
  bar.setAttribute("aria-label", `Memory by kind: ${words}`);

  document.querySelector(".fit-key").innerHTML = kinds
    .map((bytes, i) => `<tr><td><b class="k${i + 1}"></b>${KINDS[i]}</td>` +
      `<td>${gib(bytes)}</td><td>${Math.round((bytes / total) * 100)}%</td></tr>`)
    .join("");

  const fits = total <= choice.capacity;
  const moment = at === "loss" ? "when the loss is differentiated"
    : "when the optimizer steps";
  document.querySelector(".fit-words").textContent = fits
    ? `It fits: ${gib(total)} of ${gib(choice.capacity)}, highest ${moment}.`
    : `It does not fit: ${gib(total)}, ${(total / choice.capacity).toFixed(1)} times ` +
      `the device, highest ${moment}.`;
}

function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name) =>
    new Option(name, name, name === chosen, name === chosen)));
}

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.calc");
  if (!form) return;
  fill(form.model, Object.keys(MODELS), "llama3-8b");
  fill(form.precision, Object.keys(PRECISIONS), "bfloat16, float32 master");
  fill(form.optimizer, Object.keys(OPTIMIZERS), "AdamW");
  form.addEventListener("input", () => draw(form));
  draw(form);
});
