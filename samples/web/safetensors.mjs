// Reads and writes safetensors files: a JSON header, and behind it the tensors' bytes.

const TYPES = {
  F64: ["float64", Float64Array],
  F32: ["float32", Float32Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};

/** Returns name -> { type, data, dims } for the bytes of a file, in onnxruntime's words for types. */
export function parse(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = 8 + Number(view.getBigUint64(0, true));
  const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (!(dtype in TYPES)) {
      throw new Error(`${name} has the type ${dtype}; expected one of ${Object.keys(TYPES).join(", ")}`);
    }
    const [type, Elements] = TYPES[dtype];
    // A copy, as elements of eight bytes must lie at multiples of eight.
    const copy = new Uint8Array(bytes.subarray(start + data_offsets[0], start + data_offsets[1]));
    tensors[name] = { type, data: new Elements(copy.buffer), dims: shape };
  }
  return tensors;
}

/** Returns the bytes of a file with tensors of { type, data, dims }. */
export function serialize(tensors) {
  const header = {};
  const parts = [];
  let size = 0;
  for (const [name, { type, data, dims }] of Object.entries(tensors)) {
    const dtype = Object.keys(TYPES).find((key) => TYPES[key][0] === type);
    if (!dtype) {
      throw new Error(`${name} has the type ${type}; expected one of ${Object.values(TYPES).map(([known]) => known)}`);
    }
    header[name] = { dtype, shape: dims, data_offsets: [size, size + data.byteLength] };
    parts.push(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    size += data.byteLength;
  }
  // Padded with spaces, so that tensors begin at a multiple of eight.
  const text = new TextEncoder().encode(JSON.stringify(header));
  const json = new Uint8Array(8 * Math.ceil(text.length / 8)).fill(" ".charCodeAt(0));
  json.set(text);
  const bytes = new Uint8Array(8 + json.length + size);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(json.length), true);
  bytes.set(json, 8);
  let offset = 8 + json.length;
  for (const part of parts) {
    bytes.set(part, offset);
    offset += part.length;
  }
  return bytes;
}
