// Serves this folder on http://localhost:8000. The two headers let onnxruntime-web use threads.

import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".mjs": "text/javascript; charset=utf-8",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
};
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cache-Control": "no-cache",
};

const server = createServer(async (request, response) => {
  try {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const file = join(import.meta.dirname, path.endsWith("/") ? `${path}index.html` : path);
    const status = await stat(file);
    if (!status.isFile()) {
      throw new Error(`${file} is no file`);
    }
    const type = TYPES[extname(file)] ?? "application/octet-stream";
    response.writeHead(200, { ...HEADERS, "Content-Type": type, "Content-Length": status.size });
    createReadStream(file).pipe(response);
  } catch {
    response.writeHead(404, HEADERS).end("not found");
  }
});
server.listen(Number(process.env.PORT ?? 8000), "localhost", () => {
  console.log(`http://localhost:${server.address().port}/`);
});
