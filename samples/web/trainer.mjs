// Trains a step that gradfuse wrote with `step.save("step.onnx", defaults=False)`, in any of onnxruntime's packages.

import { parse, serialize } from "./safetensors.mjs";

const UPDATED = ".updated";

export class Trainer {
  #ort;
  #step;
  #evaluation;
  #values; // name -> ort.Tensor: parameters, optimizer state and learning rate

  /**
   * @param ort the module onnxruntime-web or onnxruntime-node
   * @param read name -> the bytes of a file: of step.onnx, step.eval.onnx and step.safetensors
   * @param options those of the sessions
   */
  static async create(ort, read, options = {}) {
    const trainer = new Trainer();
    trainer.#ort = ort;
    trainer.#step = await ort.InferenceSession.create(await read("step.onnx"), { logSeverityLevel: 3, ...options });
    trainer.#evaluation = await ort.InferenceSession.create(await read("step.eval.onnx"), {
      logSeverityLevel: 3,
      ...options,
    });
    trainer.load(await read("step.safetensors"));
    return trainer;
  }

  /** Takes one training step and returns the loss. */
  async step(batch) {
    const results = await this.#step.run({ ...this.#values, ...this.#tensors(batch) });
    for (const [name, tensor] of Object.entries(results)) {
      if (name.endsWith(UPDATED)) {
        this.#values[name.slice(0, -UPDATED.length)] = tensor;
      }
    }
    return results.loss.data[0];
  }

  /** Returns what the module gives in eval mode, as one flat array. */
  async evaluate(inputs) {
    const known = { ...this.#values, ...this.#tensors(inputs) };
    const feeds = Object.fromEntries(this.#evaluation.inputNames.map((name) => [name, known[name]]));
    const results = await this.#evaluation.run(feeds);
    return results[this.#evaluation.outputNames[0]].data;
  }

  /** Returns all values as a safetensors file, which `load` and gradfuse's Python API read. */
  save() {
    return serialize(this.#values);
  }

  /** Takes values from a safetensors file; throws, and changes nothing, if it is of another step. */
  load(bytes) {
    // A checkpoint from Python may have more: tied names, and parameters that do not train.
    const inputs = Object.entries(parse(bytes)).filter(([name]) => this.#step.inputNames.includes(name));
    const values = this.#tensors(Object.fromEntries(inputs));
    for (const [name, { type, dims }] of Object.entries(this.#values ?? {})) {
      const found = values[name];
      if (found?.type !== type || String(found.dims) !== String(dims)) {
        throw new Error(`${name} is ${describe(found)}; expected ${describe({ type, dims })}`);
      }
    }
    this.#values = values;
  }

  #tensors(arrays) {
    const tensors = Object.entries(arrays).map(([name, { type, data, dims }]) => [
      name,
      new this.#ort.Tensor(type, data, dims),
    ]);
    return Object.fromEntries(tensors);
  }
}

function describe(tensor) {
  return tensor ? `${tensor.type}[${tensor.dims}]` : "missing";
}
