// The handwritten digits, in batches.

import { parse } from "./safetensors.mjs";

const PIXELS = 64; // 8 x 8, from 0 to 1
const BATCH_SIZE = 64;

export class Digits {
  #data;

  /** @param bytes those of digits.safetensors */
  constructor(bytes) {
    this.#data = parse(bytes);
    this.batchesPerEpoch = Math.ceil(this.#data.train_labels.data.length / BATCH_SIZE);
  }

  /** Returns the batches of an epoch, whose order depends on the epoch's number alone. */
  epoch(number) {
    const { train_images, train_labels } = this.#data;
    const order = shuffled(train_labels.data.length, number);
    return Array.from({ length: this.batchesPerEpoch }, (_, index) => {
      const rows = order.slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE);
      const labels = BigInt64Array.from(rows, (row) => train_labels.data[row]);
      const pixels = new Float32Array(rows.length * PIXELS);
      rows.forEach((row, at) => pixels.set(train_images.data.subarray(row * PIXELS, (row + 1) * PIXELS), at * PIXELS));
      return { ...images(pixels), target: { type: "int64", data: labels, dims: [rows.length] } };
    });
  }

  /** Returns the share of the test digits that a trainer reads right. */
  async accuracy(trainer) {
    const { test_images, test_labels } = this.#data;
    const scores = await trainer.evaluate(images(test_images.data));
    let right = 0;
    test_labels.data.forEach((label, row) => {
      const own = scores.subarray(row * 10, (row + 1) * 10);
      right += own.indexOf(Math.max(...own)) === Number(label);
    });
    return right / test_labels.data.length;
  }
}

/** Returns the input of a module for some images. */
export function images(pixels) {
  return { image: { type: "float32", data: pixels, dims: [pixels.length / PIXELS, 1, 8, 8] } };
}

/** Returns the numbers below `count` in an order of their own for each seed (Fisher and Yates, mulberry32). */
function shuffled(count, seed) {
  const order = Array.from({ length: count }, (_, index) => index);
  let state = seed;
  for (let last = count - 1; last > 0; last--) {
    state = (state + 0x6d2b79f5) | 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    const other = ((bits ^ (bits >>> 14)) >>> 0) % (last + 1);
    [order[last], order[other]] = [order[other], order[last]];
  }
  return order;
}
