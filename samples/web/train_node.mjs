// Trains the digit classifier in Node: `node train_node.mjs --runtime onnxruntime-node --epochs 5`.

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";

import { Digits } from "./digits.mjs";
import { Trainer } from "./trainer.mjs";

const { values: options } = parseArgs({
  options: {
    runtime: { type: "string", default: "onnxruntime-node" }, // or onnxruntime-web
    epochs: { type: "string", default: "5" },
    folder: { type: "string", default: join(import.meta.dirname, "model") },
    losses: { type: "string" }, // a file for the loss of each step, as JSON
    save: { type: "string" }, // a file for the trained values, as safetensors
  },
});

const ort = await import(options.runtime);
const read = (name) => readFile(join(options.folder, name));
const trainer = await Trainer.create(ort, read);
const digits = new Digits(await read("digits.safetensors"));

const losses = [];
for (let epoch = 0; epoch < Number(options.epochs); epoch++) {
  const start = performance.now();
  for (const batch of digits.epoch(epoch)) {
    losses.push(await trainer.step(batch));
  }
  const taken = (performance.now() - start) / digits.batchesPerEpoch;
  const mean = losses.slice(-digits.batchesPerEpoch).reduce((sum, loss) => sum + loss) / digits.batchesPerEpoch;
  const accuracy = await digits.accuracy(trainer);
  console.log(
    `epoch ${epoch + 1}: loss ${mean.toFixed(4)}, test accuracy ${(100 * accuracy).toFixed(2)}%, ${taken.toFixed(1)} ms a step`,
  );
}
if (options.losses) {
  await writeFile(options.losses, JSON.stringify(losses));
}
if (options.save) {
  await writeFile(options.save, await trainer.save());
}
// The threads of onnxruntime-web would keep the process.
process.exit();
