// What is on the page; the training is in worker.mjs.

import { Chart } from "./chart.mjs";
import { Drawing } from "./drawing.mjs";

const [train, reset, notice, digit, bars, seen] = ["train", "reset", "notice", "digit", "bars", "seen"].map(find);
const chart = new Chart(find("chart"));
const worker = new Worker(new URL(`worker.mjs${location.search}`, import.meta.url), { type: "module" });
const drawing = new Drawing(find("drawing"), read);

let losses = [];
let accuracies = [];
let training = false;
let milliseconds = null; // of a step, a moving average
let redraw = false;

const handlers = {
  ready({ progress, webgpu, threads, version }) {
    train.disabled = reset.disabled = false;
    if (progress.losses.length) {
      say(
        `Welcome back: the weights of your last visit are loaded, after ${count(progress.losses.length, "step")}. Continue, or start over.`,
      );
    }
    const backend = webgpu ? "WebGPU" : `WebAssembly, ${count(threads, "thread")}`;
    find("footer").textContent = `onnxruntime-web ${version} · ${backend} · the weights stay in this browser`;
    show(progress);
  },
  step({ loss, epoch, milliseconds: taken }) {
    losses.push(loss);
    milliseconds = milliseconds === null ? taken : 0.9 * milliseconds + 0.1 * taken;
    find("epoch").textContent = epoch + 1;
    find("loss").textContent = loss.toFixed(4);
    find("speed").textContent = Math.round(64_000 / milliseconds).toLocaleString("en");
    update();
  },
  epoch({ step, accuracy }) {
    accuracies.push({ step, accuracy });
    showAccuracy();
    read(drawing.pixels());
    update();
  },
  state(now) {
    training = now.training;
    showButtons();
  },
  reset() {
    say("");
    show({ epoch: 0, losses: [], accuracies: [] });
    read(drawing.pixels());
  },
  reading({ probabilities }) {
    // It may have been cleared by now.
    showReading(drawing.pixels() && probabilities);
  },
  error({ message }) {
    say(message);
    train.disabled = reset.disabled = true;
  },
};
worker.onmessage = ({ data }) => handlers[data.type](data);
worker.onerror = ({ message }) =>
  handlers.error({ message: `onnxruntime-web does not load: ${message ?? "is it installed?"}` });

train.addEventListener("click", () => {
  training = !training;
  worker.postMessage({ type: training ? "train" : "pause" });
  say("");
  showButtons();
});
reset.addEventListener("click", () => worker.postMessage({ type: "reset" }));
find("clear").addEventListener("click", () => drawing.clear());

bars.replaceChildren(
  ...Array.from({ length: 10 }, (_, value) => {
    const bar = document.createElement("li");
    bar.textContent = value;
    return bar;
  }),
);

function find(id) {
  return document.getElementById(id);
}

function count(number, thing) {
  return `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
}

function say(message) {
  notice.textContent = message;
  notice.hidden = !message;
}

function show(progress) {
  ({ losses, accuracies } = progress);
  find("epoch").textContent = progress.epoch;
  find("loss").textContent = losses.length ? losses.at(-1).toFixed(4) : "–";
  showAccuracy();
  showButtons();
  update();
}

function showAccuracy() {
  const last = accuracies.at(-1);
  find("accuracy").textContent = last ? `${(100 * last.accuracy).toFixed(1)}%` : "–";
}

function showButtons() {
  train.textContent = training ? "Pause" : losses.length ? "Continue" : "Train";
}

/** Draws the chart with the browser's next frame. */
function update() {
  if (!redraw) {
    redraw = true;
    requestAnimationFrame(() => {
      redraw = false;
      chart.show(losses, accuracies);
    });
  }
}

/** Has a drawing read, and shows it as the network sees it. */
function read(pixels) {
  const context = seen.getContext("2d");
  context.clearRect(0, 0, 8, 8);
  if (!pixels) {
    showReading(null);
    return;
  }
  pixels.forEach((ink, index) => {
    context.fillStyle = `color-mix(in srgb, ${getComputedStyle(seen).color} ${100 * ink}%, transparent)`;
    context.fillRect(index % 8, Math.floor(index / 8), 1, 1);
  });
  worker.postMessage({ type: "read", pixels });
}

function showReading(probabilities) {
  const most = probabilities && probabilities.indexOf(Math.max(...probabilities));
  digit.textContent = most ?? "?";
  [...bars.children].forEach((bar, value) => {
    bar.style.setProperty("--share", probabilities?.[value] ?? 0);
    bar.classList.toggle("most", value === most);
  });
}
