// Trains beside the page, which stays responsive: takes "train", "pause", "reset" and "read", and tells how it goes.

import { Digits, images } from "./digits.mjs";
import * as storage from "./storage.mjs";
import { Trainer } from "./trainer.mjs";

const START = { epoch: 0, batch: 0, losses: [], accuracies: [] };

// What the page's address says: ?threads=2 or ?webgpu
const parameters = new URLSearchParams(location.search);

let trainer, digits, start;
let progress = structuredClone(START);
let wanted = false; // whether the page wants training
let running = false; // whether there is training
let drawing = null; // pixels that wait to be read

async function read(name) {
  const response = await fetch(new URL(`model/${name}`, import.meta.url));
  if (!response.ok) {
    throw new Error(`model/${name} is missing: run \`python samples/web/export.py\``);
  }
  return new Uint8Array(await response.arrayBuffer());
}

async function open() {
  const webgpu = parameters.has("webgpu");
  const ort = await import(`./node_modules/onnxruntime-web/dist/ort.${webgpu ? "webgpu" : "wasm"}.min.mjs`);
  ort.env.wasm.numThreads = Number(parameters.get("threads") ?? 0);
  // The kernel for WebGPU gives no indices, which the gradient of the pooling takes.
  const pooling = { forceCpuNodeNames: ["node_max_pool2d_with_indices__0"] };
  trainer = await Trainer.create(ort, read, webgpu ? { executionProviders: [{ name: "webgpu", ...pooling }] } : {});
  digits = new Digits(await read("digits.safetensors"));
  start = await trainer.save();
  const stored = await storage.load();
  if (stored) {
    try {
      trainer.load(stored.values);
      progress = stored.progress;
    } catch {
      await storage.clear(); // of another model
    }
  }
  const threads = crossOriginIsolated ? ort.env.wasm.numThreads || 1 : 1;
  postMessage({ type: "ready", progress, webgpu, threads, version: ort.env.versions.web });
}

async function train() {
  running = true;
  postMessage({ type: "state", training: true });
  while (wanted) {
    const batches = digits.epoch(progress.epoch);
    while (wanted && progress.batch < batches.length) {
      const begin = performance.now();
      const loss = await trainer.step(batches[progress.batch++]);
      progress.losses.push(loss);
      postMessage({ type: "step", loss, epoch: progress.epoch, milliseconds: performance.now() - begin });
      await answer();
      await messages();
    }
    if (progress.batch === batches.length) {
      const accuracy = await digits.accuracy(trainer);
      progress.accuracies.push({ step: progress.losses.length, accuracy });
      progress.epoch++;
      progress.batch = 0;
      postMessage({ type: "epoch", epoch: progress.epoch, step: progress.losses.length, accuracy });
    }
    await storage.save({ values: await trainer.save(), progress });
  }
  running = false;
  await answer();
  postMessage({ type: "state", training: false });
}

async function reset() {
  trainer.load(start);
  progress = structuredClone(START);
  await storage.clear();
  postMessage({ type: "reset" });
  await answer();
}

/** Reads the drawing, if there is one that was not read. */
async function answer() {
  if (drawing) {
    const pixels = drawing;
    drawing = null;
    const scores = Array.from(await trainer.evaluate(images(pixels)));
    const powers = scores.map((score) => Math.exp(score - Math.max(...scores)));
    const sum = powers.reduce((total, power) => total + power);
    postMessage({ type: "reading", probabilities: powers.map((power) => power / sum) });
  }
}

/** Lets messages that have arrived be handled. */
function messages() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

let current = open(); // what is done now, if it is to be waited for

const handlers = {
  train: () => {
    wanted = true;
    return (current = current.then(train));
  },
  pause: () => {
    wanted = false;
  },
  reset: () => {
    wanted = false;
    return (current = current.then(reset));
  },
  read: ({ pixels }) => {
    drawing = pixels;
    // Between two steps, if there is training.
    return running ? undefined : (current = current.then(answer));
  },
};

onmessage = ({ data }) => guarded(handlers[data.type](data));
guarded(current);

async function guarded(work) {
  try {
    await work;
  } catch (error) {
    postMessage({ type: "error", message: error.message });
  }
}
