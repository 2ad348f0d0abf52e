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
   * @param options those of the sessions; with WebGPU as their first provider, values stay on the GPU
   */
  static async create(ort, read, options = {}) {
    const trainer = new Trainer();
    trainer.#ort = ort;
    options = { logSeverityLevel: 3, ...options };
    const start = await read("step.safetensors");
    const [provider] = options.executionProviders ?? [];
    const onGpu =
      (provider?.name ?? provider) === "webgpu" ? { preferredOutputLocation: floatsOnGpu(parse(start)) } : {};
    trainer.#step = await ort.InferenceSession.create(await read("step.onnx"), { ...options, ...onGpu });
    trainer.#evaluation = await ort.InferenceSession.create(await read("step.eval.onnx"), options);
    trainer.load(start);
    return trainer;
  }

  /** Takes one training step and returns the loss. */
  async step(batch) {
    const results = await this.#step.run({ ...this.#values, ...this.#tensors(batch) });
    for (const [name, tensor] of Object.entries(results)) {
      if (name.endsWith(UPDATED)) {
        const own = name.slice(0, -UPDATED.length);
        this.#values[own].dispose();
        this.#values[own] = tensor;
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
  async save() {
    const arrays = {};
    for (const [name, tensor] of Object.entries(this.#values)) {
      arrays[name] = { type: tensor.type, data: await tensor.getData(), dims: tensor.dims };
    }
    return serialize(arrays);
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
    Object.values(this.#values ?? {}).forEach((tensor) => tensor.dispose());
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

function floatsOnGpu(arrays) {
  const floats = Object.entries(arrays).filter(([, { type }]) => type === "float32");
  return Object.fromEntries(floats.map(([name]) => [`${name}${UPDATED}`, "gpu-buffer"]));
}

function describe(tensor) {
  return tensor ? `${tensor.type}[${tensor.dims}]` : "missing";
}
